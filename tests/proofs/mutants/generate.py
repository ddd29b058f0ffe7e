"""Mutants that are made from the source as it is: the careless refactorings of a stranger.

A planted bug breaks a promise that its author had in mind; these show what nobody thought of. Each has a name
such as `core/sink/pulls.py:123 dropped 2`: the file, the line, what was done there, and its number on that
line. It is a `Mutant` whose text is the whole module, so it is planted and judged as any other.
"""

from __future__ import annotations

import ast
import difflib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.proofs.mutants.mutant import PACKAGE, Mutant, MutantError, sources
from tests.simulation.rare_states import is_left_out

# What the simulation runs and decides by.
FOLDERS = ("core/", "client/", "mover/reads/", "mover/chunks/", "plan/", "wire/")
# What only predicts, or tells connectors of stages.
PREDICTING = ("plan/read_costs.py", "plan/transfer_info.py")
# Statements with one of these words only log, count or show.
SHOWN = (
    "log.",
    "_LOG.",
    "phases_s",
    "metrics",
    "trace",
    "Trace",
    "tracing",
    "emit_record",
    "Record(",
    "CountServed",
)
# Functions that only look, or show: without them the product does the same.
LOOKING = ("check_integrity", "__repr__", "__str__")
BOUNDARIES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


class Change(NamedTuple):
    """What may be done to one node of a tree; `make` does it, and the tree is another then."""

    operator: str
    line: int
    make: Callable[[], None]


def changes(tree: ast.AST) -> Iterator[Change]:
    """Yield all that can be done, in the same order for each tree of one source."""
    looking = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name in LOOKING]
    showing = [one.test for one in ast.walk(tree) if isinstance(one, ast.If) and _is_shown(one.body[0])]
    asserts = [one for one in ast.walk(tree) if isinstance(one, ast.Assert)]
    left_out = {id(node) for one in [*looking, *showing, *asserts] for node in ast.walk(one)}
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        for name, value in ast.iter_fields(node):
            if name in ("body", "orelse", "finalbody") and isinstance(value, list):
                # In a class, what stands first is a matter of taste.
                yield from _of_block(value, moves=not isinstance(node, ast.ClassDef))
        match node:
            case ast.Compare(ops=[op], lineno=line) if type(op) in BOUNDARIES:
                yield Change("boundary", line, _set(node, "ops", [BOUNDARIES[type(op)]()]))
            case ast.BoolOp(values=values, lineno=line):
                for index in range(len(values)):
                    left = values[:index] + values[index + 1 :]
                    yield Change("missing-check", line, _set(node, "values", left))
            case ast.If(test=test, lineno=line) if id(test) not in left_out and not _is_shown(test):
                yield Change("missing-check", line, _set(node, "test", ast.UnaryOp(ast.Not(), test)))


def _of_block(block: list[ast.stmt], moves: bool) -> Iterator[Change]:
    """A call, an update or an early exit is lost; two neighbours change places."""
    for index, one in enumerate(block):
        targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", None)]
        is_update = isinstance(targets[0], ast.Attribute | ast.Subscript)  # what a local lacks fails at once
        is_exit = isinstance(one, ast.If) and isinstance(one.body[-1], ast.Return | ast.Raise | ast.Continue)
        is_call = isinstance(one, ast.Expr) and isinstance(one.value, ast.Call | ast.Await)
        if (is_update or is_exit or is_call or isinstance(one, ast.Delete)) and not _is_shown(one):
            yield Change("dropped", one.lineno, _put(block, index, ast.Pass()))
        if moves and isinstance(one, ast.Expr | ast.Assign | ast.AugAssign) and not _is_shown(one):
            after = block[index + 1] if index + 1 < len(block) else None
            is_statement = isinstance(after, ast.Expr | ast.Assign | ast.AugAssign)
            is_docstring = isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
            if after is None or not is_statement or is_docstring or not (_calls(one) or _calls(after)):
                continue
            shared = (_sets(one) & _names(after)) | (_sets(after) & _names(one))
            is_new_local = isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name | ast.Tuple)
            if (_acts(one) and _acts(after)) or (shared and not is_new_local):  # a local's lack fails at once
                yield Change("moved", one.lineno, _put(block, index, after, one))


def _acts(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)


def _sets(node: ast.stmt) -> set[str]:
    """Return what a statement may change, so that its place matters to another that names it."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    functions = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
    subjects = [function.value for function in functions if isinstance(function, ast.Attribute)]
    return {ast.unparse(one) for one in [*filter(None, targets), *subjects]}


def _names(node: ast.stmt) -> set[str]:
    return {ast.unparse(one) for one in ast.walk(node) if isinstance(one, ast.Name | ast.Attribute)}


def _calls(node: ast.stmt) -> bool:
    return any(isinstance(one, ast.Call) for one in ast.walk(node))


def _is_shown(node: ast.AST) -> bool:
    return any(word in ast.unparse(node) for word in SHOWN)


def _set(node: ast.AST, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(node, name, value)


def _put(block: list[ast.stmt], index: int, *new: ast.stmt) -> Callable[[], None]:
    def put() -> None:
        block[index : index + len(new)] = new

    return put


@cache
def names(path: Path) -> list[str]:
    """Return the names of a file's mutants."""
    file, numbers = path.relative_to(PACKAGE).as_posix(), Counter[str]()
    found = []
    for change in changes(ast.parse(sources()[path])):
        name = f"{file}:{change.line} {change.operator}"
        numbers[name] += 1
        found.append(name if numbers[name] == 1 else f"{name} {numbers[name]}")
    return found


def named(name: str) -> Mutant:
    """Return the mutant of this name. Raises MutantError where there is none."""
    path = PACKAGE / name.partition(":")[0]
    if path not in sources() or name not in names(path):
        raise MutantError(f"no mutant has the name {name!r}")
    tree = ast.parse(sources()[path])
    list(changes(tree))[names(path).index(name)].make()
    return Mutant(
        name=name, promise="", old=sources()[path], new=ast.unparse(ast.fix_missing_locations(tree))
    )


def draw(seed: int) -> Iterator[Mutant]:
    """Yield mutants, each once, the same for one seed and one source. The most are of long files."""
    files = {path: path.relative_to(PACKAGE).as_posix() for path in sources()}
    chosen = [
        path
        for path, file in files.items()
        if file.startswith(FOLDERS) and file not in PREDICTING and not is_left_out(file)
    ]
    rng, drawn = random.Random(seed), set[str]()
    while True:
        (path,) = rng.choices(chosen, [len(sources()[path]) for path in chosen])
        if left := [name for name in names(path) if name not in drawn]:
            drawn.add(name := rng.choice(left))
            yield named(name)


def diff_of(mutant: Mutant) -> str:
    """Return what the mutant changes, without comments, as a unified diff."""
    old, new = ast.unparse(ast.parse(mutant.old)).splitlines(), mutant.new.splitlines()
    return "\n".join(difflib.unified_diff(old, new, mutant.name, n=2, lineterm=""))
