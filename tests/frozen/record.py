"""The recorded files: where they are, how they are written, and how a difference is shown."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "recorded"
HOW_TO_RECORD = "PYTHONPATH=tests .venv/bin/python -m frozen {name}"
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
