"""The recorded files: where they are, how they are written, and how a difference is shown."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "recorded"
# Of the recorded files and of version 1's frames: a search and replace over the tree changes the code and
# what is recorded of it alike, and no digest.
DIGESTS = Path(__file__).parent / "digests.json"
TESTS = Path(__file__).parents[1]
FOREVER = ("fixtures/0.1/*.json", "schema_0_1.py")  # wherever below tests/ they are
HOW_TO_RECORD = ".venv/bin/python -m tests.frozen {name}"
MAX_LINES = 80  # of a difference; more are counted


def read(name: str) -> Any:
    """Return what was recorded last."""
    return json.loads((RECORDED / f"{name}.json").read_text())


def write(name: str, surface: Any) -> bool:
    """Record the surface. Return whether it differs from what was recorded before."""
    path = RECORDED / f"{name}.json"
    text = json.dumps(surface, indent=1, ensure_ascii=False) + "\n"
    if path.exists() and path.read_text() == text:
        return False
    path.write_text(text)
    return True


def digests() -> dict[str, str]:
    """Return the digest of each file that nobody edits, by its name."""
    paths = [*RECORDED.glob("*.json"), *(path for name in FOREVER for path in TESTS.rglob(name))]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(paths)}


def write_digests(names: Iterable[str]) -> None:
    """Record the digests of these surfaces' files; the others' stay, so that an edit is still seen."""
    before = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    recorded = {f"{name}.json" for name in names}
    now = {name: d if name in recorded else before.get(name, d) for name, d in digests().items()}
    DIGESTS.write_text(json.dumps(now, indent=1) + "\n")


def difference(name: str, old: Any, new: Any) -> str:
    """Return what changed, a line for each value, and how to record it; "" where nothing did."""
    lines = changed_lines(old, new)
    if not lines:
        return ""
    shown = lines[:MAX_LINES] + ([f"... and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else [])
    head = f"the surface {name!r} is not what was recorded (- recorded, + now):"
    foot = f"If the change is intended, record it: {HOW_TO_RECORD.format(name=name)}"
    return "\n".join([head, *shown, foot])


def changed_lines(old: Any, new: Any) -> list[str]:
    """Return `- path = value` and `+ path = value`, in order."""
    before, after = list(_flat(old, "")), list(_flat(new, ""))
    diff = difflib.unified_diff(before, after, lineterm="", n=0)
    return [f"{line[0]} {line[1:]}" for line in diff if line[:3] not in ("---", "+++") and line[0] in "+-"]


def _flat(value: Any, path: str) -> Iterator[str]:
    """Yield a line for each leaf. An entry that has a name is named by it, so what follows keeps its path."""
    match value:
        case dict() if value:
            for key, inner in value.items():
                yield from _flat(inner, f"{path}.{key}" if path else key)
        case list() if any(isinstance(inner, dict | list) for inner in value):
            for number, inner in enumerate(value):
                name = inner.get("name", number) if isinstance(inner, dict) else number
                yield from _flat(inner, f"{path}[{name}]")
        case _:
            yield f"{path} = {json.dumps(value, ensure_ascii=False)}"
