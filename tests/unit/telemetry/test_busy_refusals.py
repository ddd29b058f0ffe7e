"""Every refusal as `busy` is counted, also those that raise no BusyError."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvxferd
from kvxferd.core.limits import BUSY_LIMITS

PACKAGE = Path(kvxferd.__file__).parent
# What runs in the daemon and refuses. Elsewhere a refusal is of another process, which counts it.
SOURCES = [
    PACKAGE / "frame_socket.py",
    *(PACKAGE / "control").rglob("*.py"),
    *(PACKAGE / "core").rglob("*.py"),
]
COUNT = "count_busy_refusal"


def functions_of(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def calls_in(function: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(function) if isinstance(node, ast.Call)]


def refuses(call: ast.Call) -> bool:
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    is_counted_itself = ast.unparse(call.func) == "BusyError"
    return not is_counted_itself and "Code.BUSY" in map(ast.unparse, given)


def limits_counted_in(function: ast.AST) -> list[str]:
    names = [call.args for call in calls_in(function) if ast.unparse(call.func) == COUNT]
    return [str(ast.literal_eval(name[0])) if name else BUSY_LIMITS[-1] for name in names]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_refusal_without_a_busy_error_counts_itself(path: Path) -> None:
    for function in functions_of(ast.parse(path.read_text())):
        num_refusals = sum(map(refuses, calls_in(function)))
        counted = limits_counted_in(function)
        assert num_refusals <= len(counted), f"{function.name} does not call {COUNT} for each refusal"
        assert set(counted) <= set(BUSY_LIMITS), function.name
