"""Refuse names and words that a rename has taken out: docs/former_names.toml lists them.

python docs/tools/check_names.py [ROOT]

Definitions are read from the syntax trees of kvxferd/, and compared package by package. Prose is the
docstrings and comments of kvxferd/, and the documents; it is searched for metaphors alone.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LIST = "docs/former_names.toml"
PACKAGE = "kvxferd"
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md")
# A function inside a function is not read: its name does not leave it.
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

FormerNames = dict[str, dict[str, dict[str, str]]]


class Definition(NamedTuple):
    """A name that a file defines; `kind` is a table's name in the list."""

    kind: str
    name: str
    line: int


def package_of(path: Path) -> str:
    """Return the package of a file: `core` of kvxferd/core/node.py, `root` of kvxferd/daemon.py."""
    return path.parts[1] if len(path.parts) > 2 else "root"


def modules_of(path: Path) -> Iterator[Definition]:
    """Yield the module that the file is, and the folders that it stands in below its package."""
    names = path.parts[2:-1] if path.stem == "__init__" else (*path.parts[2:-1], path.stem)
    for name in names:
        yield Definition("modules", name, 1)


def definitions(body: Iterable[ast.stmt], *, in_class: bool = False) -> Iterator[Definition]:
    """Yield the classes, functions, methods and constants of a module or class."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield Definition("classes", node.name, node.lineno)
            yield from definitions(node.body, in_class=True)
        elif isinstance(node, FUNCTIONS):
            yield Definition("functions", node.name, node.lineno)
        elif isinstance(node, ast.If | ast.Try):
            yield from definitions(node.body, in_class=in_class)
            yield from definitions(node.orelse, in_class=in_class)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not in_class:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield Definition("constants", target.id, node.lineno)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the first line's number and the text of each docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield node.body[0].lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line's number and the text of each comment."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


class Check:
    """What the tree below `root` may not contain, and what was found of it."""

    def __init__(self, root: Path, former: FormerNames, metaphors: dict[str, str]) -> None:
        self._root = root
        self._former = former
        self._metaphors = metaphors
        words = "|".join(map(re.escape, metaphors))
        # Plurals too. `lend_ids` is one word, so that what is frozen is not found by its parts.
        self._pattern = re.compile(rf"\b({words})s?\b", re.IGNORECASE) if words else None
        self.found: list[str] = []

    def run(self) -> list[str]:
        """Return one line for each offence: file, line, the old name and the new one."""
        for path in sorted((self._root / PACKAGE).rglob("*.py")):
            self._check_module(path)
        for pattern in DOCUMENTS:
            for path in sorted(self._root.glob(pattern)):
                self._check_prose(path, 1, path.read_text())
        return self.found

    def _check_module(self, path: Path) -> None:
        source = path.read_text()
        tree = ast.parse(source)
        relative = path.relative_to(self._root)
        package = package_of(relative)
        former = self._former.get(package, {})
        for kind, name, line in (*modules_of(relative), *definitions(tree.body)):
            new = former.get(kind, {}).get(name)
            if new is not None:
                self.found.append(
                    f"{relative}:{line}: `{name}` is a former name in {package}: call it `{new}`"
                )
        for line, text in (*docstrings(tree), *comments(source)):
            self._check_prose(path, line, text)

    def _check_prose(self, path: Path, line: int, text: str) -> None:
        if self._pattern is None:
            return
        for found in self._pattern.finditer(text):
            at = line + text.count("\n", 0, found.start())
            instead = self._metaphors[found[1].lower()]
            self.found.append(
                f'{path.relative_to(self._root)}:{at}: "{found[0]}" is a metaphor: write {instead}'
            )


def check(root: Path = ROOT) -> list[str]:
    """Return the offences of the tree below `root` against its own list."""
    tables = tomllib.loads((root / LIST).read_text())
    metaphors: dict[str, str] = tables.pop("prose")
    return Check(root, tables, metaphors).run()


if __name__ == "__main__":
    found = check(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
    for line in found:
        print(line, file=sys.stderr)
    sys.exit(1 if found else 0)
