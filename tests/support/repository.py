"""The files of this repository, as tests and the tools of the documents read them."""

from __future__ import annotations

import ast
import functools
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BINARY = {".pyc", ".png", ".svg", ".so"}


@functools.cache
def files() -> tuple[Path, ...]:
    """Return every file that git tracks or would; where there is no git, every file of these folders."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        names = listed.stdout.splitlines()
        found = [ROOT / name for name in names]
    else:
        folders = ("kvxferd", "tests", "docs", "deploy", "benchmarks", "examples", "config")
        found = [path for folder in folders for path in (ROOT / folder).rglob("*")]
        found += ROOT.glob("*")
    return tuple(sorted(p for p in found if p.is_file() and p.suffix not in _BINARY))


def files_in(*folders: str) -> list[Path]:
    """Return the files below those folders, or those files themselves."""
    roots = [ROOT / folder for folder in folders]
    return [path for path in files() if any(path == root or root in path.parents for root in roots)]


@functools.cache
def text_of(path: Path) -> str:
    """Return the file's text; "" where it is none."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        return ""


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return a Python file's syntax tree."""
    return ast.parse(text_of(path), str(path))
