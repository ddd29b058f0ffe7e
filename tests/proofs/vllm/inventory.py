"""What vLLM's sources define of caches: python -m tests.proofs.vllm.inventory DIRECTORY [--write VERSION].

DIRECTORY is the package `vllm`. Its sources are parsed, and nothing of it is imported. With --write the
inventory is kept beside this file, for the table of docs/reference/vllm-inventory.md.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
SPEC, BACKEND = "KVCacheSpec", "AttentionBackend"

Inventory = dict[str, dict[str, list[str]]]  # by file: its "caches", and the "backends" that it defines


def inventory_of(package: Path) -> Inventory:
    """Return each file that makes caches or defines attention backends, with their classes' names.

    A cache is made in a function `get_kv_cache_spec`. All classes of caches are listed at the file that
    defines them.
    """
    trees = {
        path.relative_to(package).as_posix(): ast.parse(path.read_text())
        for path in sorted(package.rglob("*.py"))
        if any(word in path.read_text() for word in (SPEC, "Backend(", BACKEND, "get_kv_cache_spec"))
    }
    bases: dict[str, set[str]] = {}
    for tree in trees.values():
        for node in _classes(tree):
            bases.setdefault(node.name, set()).update(_name_of(base) for base in node.bases)
    found: Inventory = {}
    for path, tree in trees.items():
        defined = [node.name for node in _classes(tree)] + list(_composites(tree))
        bases |= {name: {BACKEND} for name in _composites(tree)}
        caches = {name for name in defined if _descends(name, SPEC, bases)} | set(_made_caches(tree, bases))
        backends = {name for name in defined if _descends(name, BACKEND, bases)}
        if caches or backends:
            found[path] = {"caches": sorted(caches), "backends": sorted(backends)}
    return found


def kept_inventory(version: str) -> Inventory:
    """Return the inventory that is kept of a version."""
    found: Inventory = json.loads(_path(version).read_text())
    return found


def _path(version: str) -> Path:
    return HERE / f"inventory-{version}.json"


def _classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name[0] != "_")


def _composites(tree: ast.Module) -> Iterator[str]:
    """Yield the names of backends that a call makes of several."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name_of(node.func) == "create_composite_attention_backend":
            for keyword in node.keywords:
                if keyword.arg == "name" and isinstance(keyword.value, ast.Constant):
                    yield str(keyword.value.value)


def _made_caches(tree: ast.Module, bases: dict[str, set[str]]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "get_kv_cache_spec":
            names = (_name_of(call.func) for call in ast.walk(node) if isinstance(call, ast.Call))
            yield from (name for name in names if _descends(name, SPEC, bases))


def _name_of(node: ast.expr) -> str:
    """Return the last name of an expression that names a class."""
    if isinstance(node, ast.Subscript):
        return _name_of(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _descends(name: str, base: str, bases: dict[str, set[str]]) -> bool:
    """Whether a class is below another one."""
    return any(one == base or _descends(one, base, bases) for one in bases.get(name, ()) if one != name)


def main() -> int:
    """Print or keep the inventory. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="inventory", description=__doc__.partition("\n")[0])
    parser.add_argument("package", type=Path)
    parser.add_argument("--write", metavar="VERSION")
    given = parser.parse_args()
    text = json.dumps(inventory_of(given.package), indent=1) + "\n"
    if given.write:
        _path(given.write).write_text(text)
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
