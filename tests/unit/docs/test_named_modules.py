"""Modules that text names exist: in strings, documents, scripts and settings, and behind `-m`.

A rename that misses one of them passes the type checker. A dotted name below `kvxferd` must be a module, or a
name in one; both are read from the files, so that no library is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.repository import ROOT, files, text_of

# Names of files and hosts, not of modules.
SUFFIXES = {"toml", "key", "service", "sock", "log", "conf", "json", "svg", "png", "git", "nft"}
# Where spans and attributes of OpenTelemetry are named, which begin with the service's name and a dot, too.
WITH_SPANS = (
    "docs/how-to/monitor.md",
    "kvxferd/telemetry/traces/",
    "tests/integration/test_traces.py",
    "tests/unit/telemetry/",
)
# What `-m` names beside modules of this repository: others' modules, and marks of pytest.
FOREIGN = {
    *("build", "http", "mypy", "pip", "pytest", "sglang", "sglang_router", "venv", "vllm"),
    *("gpu", "netns", "not", "slow"),
    *("module", "self", "sh"),  # `-m`, self.module
}

_DOTTED = re.compile(r"(?<![\w./@-])(kvxferd(?:\.[A-Za-z_]\w*)+(?::[A-Za-z_]\w*)?)")
_IMPORT = re.compile(r"^[ \t]*from (kvxferd[\w.]*) import (?:\(([^)]*)\)|([^(\n]+))$", re.MULTILINE)
_RUN = re.compile(r"""-m[\s"',]+([a-z_]\w*(?:\.[a-z_]\w*)*)""")


def texts() -> Iterator[tuple[str, str]]:
    """Yield name and text of each file."""
    for path in files():
        yield path.relative_to(ROOT).as_posix(), text_of(path)


def file_of(parts: list[str]) -> Path | None:
    """Return the file of a module of this repository."""
    path = ROOT.joinpath(*parts)
    return next((p for p in (path / "__init__.py", path.with_suffix(".py")) if p.is_file()), None)


@cache
def is_there(dotted: str) -> bool:
    """Whether the longest module of a dotted name has the name that follows, in its text."""
    parts = re.split(r"[.:]", dotted)
    for length in range(len(parts), 0, -1):
        if path := file_of(parts[:length]):
            rest = parts[length:]
            return not rest or rest[0].startswith("__") or bool(re.search(rf"\b{rest[0]}\b", text_of(path)))
    return False


def can_run(module: str) -> bool:
    """Whether `-m` can run it: a package by its `__main__`, a module that looks whether it is one."""
    path = file_of(module.split("."))
    return path is not None and (
        (path.parent / "__main__.py").is_file() if path.name == "__init__.py" else "__main__" in text_of(path)
    )


def test_every_dotted_name_is_a_module_or_in_one() -> None:
    found: set[tuple[str, str]] = set()
    for where, text in texts():
        dotted = {name for name in _DOTTED.findall(text) if name.rpartition(".")[2] not in SUFFIXES}
        if where.startswith(WITH_SPANS):
            dotted = {name for name in dotted if file_of(name.split(".")[:2])}
        found |= {(where, name) for name in dotted}
        if where.endswith(".py"):
            for module, *listed in _IMPORT.findall(text):
                names = re.sub(r"#.*", "", "".join(listed)).split(",")
                found |= {(where, f"{module}.{name.split()[0]}") for name in names if name.strip()}
    assert len(found) > 1000, "the patterns find nothing any more"
    assert [f"{where}: {name}" for where, name in sorted(found) if not is_there(name)] == []


def test_every_module_that_is_run_can_be_run() -> None:
    found = {(where, name) for where, text in texts() for name in _RUN.findall(text)}
    ours = {(where, name) for where, name in found if name.split(".")[0] not in FOREIGN}
    assert {"kvxferd.cli", "kvxferd.mover.process.forkserver"} <= {name for _, name in ours}
    assert [f"{where}: -m {name}" for where, name in sorted(ours) if not can_run(name)] == []
