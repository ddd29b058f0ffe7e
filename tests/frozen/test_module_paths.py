"""Modules, attributes and files that are named in text exist: in strings, documents, scripts and settings.

A rename that misses one of them passes the type checker. Whatever is read as a dotted name below `kvxferd`
must be a module, or a name at the top of one; read from the files, so that no library is needed.
"""

from __future__ import annotations

import ast
import functools
import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.frozen.tree import PACKAGE, ROOT, files, files_in, parsed, text_of

# What was true when it was written, and names places of that day.
HISTORY = {"CHANGELOG.md"}
HISTORY_FOLDERS = ("docs/adr", "tests/frozen/recorded")
# Files called so: no module has such a name.
FILE_SUFFIXES = {"toml", "key", "service", "sock", "log", "conf", "json", "svg", "png", "git", "nft"}

# They name spans and attributes of OpenTelemetry, which begin with the service's name and a dot, too.
WITH_SPANS = (
    "docs/how-to/tracing.md",
    "kvxferd/telemetry/traces/",
    "tests/integration/test_traces.py",
    "tests/unit/telemetry/",
)

_DOTTED = re.compile(r"(?<![\w./@-])kvxferd(?:\.[A-Za-z_]\w*)+(?::[A-Za-z_]\w*)?")
_QUOTED = re.compile(r"""["'](kvxferd(?:\.[a-z_]\w*)+)["']""")
_RUN = re.compile(r"""-m[\s"',]+([a-z_]\w*(?:\.[a-z_]\w*)*)""")
_IMPORT = re.compile(r"^[ \t]*from (kvxferd[\w.]*) import (?:\(([^)]*)\)|([^(\n]+))$", re.MULTILINE)
_FILE = re.compile(
    r"(?<![\w./-])((?:kvxferd|tests|docs|deploy|benchmarks|config|examples)/[\w./-]*\.(?:py|md|toml|sh|service|"
    r"yaml|txt|json|c))\b"
)
# What `-m` names beside modules of this repository: others' modules, and marks of pytest.
FOREIGN = {"build", "http", "mypy", "venv", "pip", "pytest", "vllm", "gpu", "netns", "slow", "sh", "module"}
# Named by a test because it is not there.
ABSENT = {"tests/there_is_no_such_test.py"}


class Mention(NamedTuple):
    """Something named in a file."""

    name: str
    where: str


def texts() -> Iterator[tuple[str, str]]:
    for path in files():
        name = path.relative_to(ROOT).as_posix()
        if name not in HISTORY and not name.startswith(HISTORY_FOLDERS):
            yield name, text_of(path)


def mentions(pattern: re.Pattern[str]) -> list[Mention]:
    """Return what the pattern finds: each name once in each file."""
    found = {}
    for where, text in texts():
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            name = match[match.lastindex or 0]
            found.setdefault((name, where), Mention(name, f"{where}:{line}"))
    return list(found.values())


def file_of(parts: list[str]) -> Path | None:
    """Return the file of a module of the package, the tests or the benchmarks."""
    path = ROOT.joinpath(*parts)
    for candidate in (path / "__init__.py", path.with_suffix(".py")):
        if candidate.is_file():
            return candidate
    return None


@functools.cache
def names_in(path: Path) -> set[str]:
    """Return what a module defines or imports at its top; with `__getattr__`, what it makes on demand too."""
    found = set()
    open_nodes: list[ast.AST] = [parsed(path)]
    while open_nodes:
        for node in ast.iter_child_nodes(open_nodes.pop()):
            match node:
                case ast.FunctionDef(name="__getattr__"):
                    found |= {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
                case ast.alias(name=name, asname=asname):
                    found.add(asname or name)
                case ast.Lambda() | ast.ListComp() | ast.DictComp() | ast.GeneratorExp():
                    pass
                case _:
                    open_nodes.append(node)
    return found


def problem_of(dotted: str) -> str:
    """Return why a dotted name is none; "" where it is one."""
    module, _, attribute = dotted.partition(":")
    parts = module.split(".") + ([attribute] if attribute else [])
    for length in range(len(parts), 0, -1):
        if path := file_of(parts[:length]):
            rest = parts[length:]
            if not rest or rest[0] in names_in(path) or rest[0].startswith("__"):
                return ""
            return f"{path.relative_to(ROOT)} has no {rest[0]}"
    return "there is no such module"


def is_in_a_package(dotted: str) -> bool:
    """Whether its second part is a module or a package of kvxferd."""
    return file_of(dotted.split(".")[:2]) is not None


def test_every_dotted_name_is_a_module_or_in_one() -> None:
    found = [m for m in mentions(_DOTTED) if m.name.rpartition(".")[2] not in FILE_SUFFIXES]
    assert len(found) > 50, "the pattern finds nothing any more"
    spans = [m for m in found if m.where.startswith(WITH_SPANS) and not is_in_a_package(m.name)]
    missing = [f"{m.where}: {m.name}: {why}" for m in found if m not in spans and (why := problem_of(m.name))]
    assert not missing, "named, and not there:\n" + "\n".join(missing)


def test_every_module_that_is_run_can_be_run() -> None:
    found = [m for m in mentions(_RUN) if m.name.split(".")[0] not in FOREIGN]
    assert {"kvxferd.cli", "kvxferd.mover.process.forkserver", "tests.property.chaos"} <= {
        m.name for m in found
    }
    missing = []
    for mention in found:
        path = file_of(mention.name.split("."))
        if path is None:
            missing.append(f"{mention.where}: -m {mention.name}: there is no such module")
        elif path.name == "__init__.py" and not (path.parent / "__main__.py").is_file():
            missing.append(f"{mention.where}: -m {mention.name}: the package has no __main__.py")
        elif path.name != "__init__.py" and "__main__" not in text_of(path):
            missing.append(f"{mention.where}: -m {mention.name}: it does nothing when it is run")
    assert not missing, "run, and not there:\n" + "\n".join(missing)


def test_every_file_that_is_named_is_there() -> None:
    missing = [f"{m.where}: {m.name}" for m in mentions(_FILE) if not (ROOT / m.name).exists()]
    missing = [line for line in missing if not line.endswith(tuple(ABSENT))]
    assert not missing, "named, and not there:\n" + "\n".join(missing)


# --- imports that no test runs and no type checker sees: in benchmarks, in functions, for GPUs or vLLM


def test_every_import_of_the_package_is_there() -> None:
    missing = []
    num_looked_at = 0
    for path in files_in("tests", "benchmarks", "examples", "kvxferd/integrations"):
        if path.suffix != ".py":
            continue
        text = text_of(path)
        for match in _IMPORT.finditer(text):
            listed = re.sub(r"#.*", "", match[2] or match[3])
            names = [f"{match[1]}.{name.split()[0]}" for name in listed.split(",") if name.strip()]
            num_looked_at += len(names)
            where = f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start(1)) + 1}"
            missing += [f"{where}: {name}: {why}" for name in names if (why := problem_of(name))]
    assert num_looked_at > 1000
    assert not missing, "imported, and not there:\n" + "\n".join(missing)


def test_the_marks_of_a_pull_s_way_name_methods_and_messages() -> None:
    """`benchmarks/hops` wraps methods by their names."""
    tree = parsed(ROOT / "benchmarks" / "hops" / "sitecustomize.py")
    modules = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    defined = {name for path in files_in("kvxferd") if path.suffix == ".py" for name in classes_in(path)}
    missing = []
    num_marks = 0
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Name(id="_before" | "_after"),
                args=[ast.Name(id=owner), ast.Constant(value=str(method)), _, *wanted],
            ):
                num_marks += 1
                path = file_of(modules[owner].split("."))
                if path is None or method not in classes_in(path).get(owner, set()):
                    missing.append(f"{owner}.{method}")
                missing += [
                    str(w.value) for w in wanted if isinstance(w, ast.Constant) and w.value not in defined
                ]
    assert num_marks > 5
    assert not missing, f"marked, and not there: {', '.join(missing)}"


def classes_in(path: Path) -> dict[str, set[str]]:
    """Return the classes that a file defines, with their methods."""
    return {
        node.name: {f.name for f in node.body if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)}
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef)
    }


# --- pyproject.toml


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_import_contracts_name_modules() -> None:
    missing = []
    for contract in project()["tool"]["importlinter"]["contracts"]:
        own = contract.get("source_modules", []) + contract.get("forbidden_modules", [])
        layers = [part.strip("() ") for layer in contract.get("layers", []) for part in layer.split("|")]
        names = [name for name in own if name.split(".")[0] == "kvxferd"]
        names += [f"{container}.{part}" for container in contract.get("containers", []) for part in layers]
        missing += [f"{contract['name']}: {name}" for name in names if file_of(name.split(".")) is None]
    assert not missing, missing


def test_every_top_module_stands_in_the_layers() -> None:
    layers, *_ = project()["tool"]["importlinter"]["contracts"]
    named = {part.strip("() ") for layer in layers["layers"] for part in layer.split("|")}
    there = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()}
    assert there - {"__init__"} == named


def test_the_linter_s_patterns_match_files() -> None:
    patterns = project()["tool"]["ruff"]["lint"]["per-file-ignores"]
    assert [p for p in patterns if not any(ROOT.glob(p.removesuffix("/**")))] == []


# --- started


def test_every_verb_s_module_has_its_verb() -> None:
    root = importlib.import_module("kvxferd.cli.root")
    for verb, module in root.VERBS.items():
        assert hasattr(importlib.import_module(module), verb.replace("-", "_")), f"{verb}: {module}"


def test_every_check_of_doctor_has_its_module() -> None:
    runner = importlib.import_module("kvxferd.doctor.runner")
    assert [name for name, check in runner.select_checks(()) if callable(check)] == list(runner.CHECKS)


def test_what_is_started_starts() -> None:
    commands = [["-m", module, "--help"] for module in ("kvxferd.cli", "kvxferd.mover.process.forkserver")]
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(_python, commands))
    for command, process in zip(commands, done, strict=True):
        assert process.returncode == 0, f"{command}: {process.stderr}"
        assert "usage" in process.stdout.lower()


def test_what_is_named_for_a_process_can_be_imported() -> None:
    named = {m.name for pattern in (_RUN, _QUOTED) for m in mentions(pattern)}
    modules = [n for n in sorted(named) if n.startswith("kvxferd.") and file_of(n.split("."))]
    assert len(modules) > 20
    for module in modules:
        if not _needs_vllm(module):
            importlib.import_module(module)


def _needs_vllm(module: str) -> bool:
    """Whether vLLM's own modules are imported by it."""
    path = file_of(module.split("."))
    return path is not None and bool(re.search(r"^(from|import) vllm\b", text_of(path), re.MULTILINE))


def _python(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVXFERD_")}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        cwd=ROOT,
        env=environ | {"PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize("group", ["scripts", "entry-points"])
def test_entry_points_are_there(group: str) -> None:
    found = project()["project"][group]
    targets = [
        t for value in found.values() for t in (value.values() if isinstance(value, dict) else [value])
    ]
    assert targets
    assert [f"{target}: {why}" for target in targets if (why := problem_of(target))] == []
