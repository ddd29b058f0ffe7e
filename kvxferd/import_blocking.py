"""Imports without what they would drag in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def block_import(name: str) -> Iterator[None]:
    """Have `import name` fail inside. A module that is loaded already stays visible."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
