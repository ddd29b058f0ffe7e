"""Every `KVXFERD_` variable that is read, set or written of, by the part of the repository that does."""

from __future__ import annotations

import re
from typing import Any

from tests.frozen.tree import ROOT, files_in, text_of

PARTS = {
    "package": ("kvxferd",),
    "tests": ("tests",),
    "Makefile": ("Makefile", ".ci"),
    "deploy": ("deploy", "Dockerfile", "config"),
    "benchmarks": ("benchmarks", "examples"),
    "documents": ("docs", "README.md"),
}
# Made from the settings, with the variable of each, and from the help of the verbs.
GENERATED = {ROOT / "docs/reference/configuration.md", ROOT / "docs/reference/cli.md"}
_VARIABLE = re.compile(r"KVXFERD_[A-Z0-9_]*[A-Z0-9]")


def surface() -> dict[str, Any]:
    """Return the names in each part. The variables of settings are a surface of their own."""
    found = {}
    for part, folders in PARTS.items():
        paths = [path for path in files_in(*folders) if "frozen" not in path.parts]
        paths = [path for path in paths if path not in GENERATED]
        found[part] = sorted({name for path in paths for name in _VARIABLE.findall(text_of(path))})
    return found
