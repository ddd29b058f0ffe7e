"""Output of verbs: tables for people, one JSON object for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

# Piped output is for grep: wide enough that no row wraps.
PIPED_WIDTH = 200


def console() -> Console:
    """Return a console on standard output."""
    return Console() if sys.stdout.isatty() else Console(width=PIPED_WIDTH)


def print_json(value: Any) -> None:
    """Print one JSON object, indented."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
    sys.stdout.flush()


def print_table(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table, or one line if there are no rows. Numbers are right-aligned."""
    rows = [list(row) for row in rows]
    if not rows:
        console().print(f"{title}: none", highlight=False)
        return
    table = Table(title=title, title_justify="left")
    for column, head in enumerate(heads):
        numeric = all(isinstance(row[column], int | float) for row in rows)
        table.add_column(head, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(plain_text(cell) for cell in row))
    console().print(table)


def plain_text(value: object) -> Text:
    """Return text that is shown as it is: without markup, and without control characters."""
    return Text("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value)))


def format_bytes(count: float) -> str:
    """Return a size: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_duration(seconds: float) -> str:
    """Return a duration with three digits: ``12.3 ms``."""
    for limit, scale, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if abs(seconds) < limit:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.1f} s"
