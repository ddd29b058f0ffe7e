"""Every `KVXFERD_` variable that is read, set or written of, by the part of the repository that does."""

from __future__ import annotations

import re
from typing import Any

from frozen.tree import files_in, text_of

PARTS = {
    "package": ("kvxferd",),
    "tests": ("tests",),
    "Makefile": ("Makefile", ".ci"),
    "deploy": ("deploy", "Dockerfile", "config"),
    "benchmarks": ("benchmarks", "examples"),
    "documents": ("docs", "README.md"),
}
_VARIABLE = re.compile(r"KVXFERD_[A-Z0-9_]*[A-Z0-9]")


def surface() -> dict[str, Any]:
    """Return the names in each part. The variables of settings are a surface of their own."""
    found = {}
    for part, folders in PARTS.items():
        paths = [path for path in files_in(*folders) if "frozen" not in path.parts]
        found[part] = sorted({name for path in paths for name in _VARIABLE.findall(text_of(path))})
    return found
