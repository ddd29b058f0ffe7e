"""The generated parts of docs/reference/sglang-support.md."""

from __future__ import annotations

from collections.abc import Iterator

from docs.tools.markdown_parts import table
from kvxferd.integrations.sglang.layout.support import POOLS, SGLANG_VERSIONS


def sglang_pools() -> Iterator[str]:
    """Yield a table of SGLang's pools, those that are refused for one reason in one row."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name, found in POOLS.items():
        key = ("refused" if found.describer is None else "moved", found.note, found.proof)
        alike.setdefault(key, []).append(f"`{name}`")
    rows = [(", ".join(names), *key) for key, names in alike.items()]
    yield from table(("pool", "is", "what moves, or why not", "proved by"), rows)


def sglang_versions() -> Iterator[str]:
    """Yield the versions of SGLang that the tests run."""
    yield f"{', '.join(SGLANG_VERSIONS)}."
