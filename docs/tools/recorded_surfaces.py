"""What tests/frozen records of the surfaces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "frozen" / "recorded"


def recorded(surface: str) -> Any:
    """Return what tests/frozen records of a surface."""
    return json.loads((RECORDED / f"{surface}.json").read_text())
