"""Output of verbs: tables for people, one JSON object for machines.

No cell is cut to fit: a terminal that is too narrow gets fewer columns, by their ranks, and a note of those
that are left out.

rich is imported where it is used: a completion of the shell's needs the verbs, and shows no table.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

# Piped output is for grep: wide enough that no row wraps. An id has at most 256 characters, an error's
# message 4,096, and a row a dozen of them.
PIPED_WIDTH = 1 << 17
# Of all `--json`: raised when a key goes away or means something else. Keys are added without.
JSON_VERSION = 1
# A longer cell moves the rest of its row: one long id must not make every row wrap.
MAX_ALIGNED = 48
GAP = 2  # blanks between two columns


def console() -> Console:
    """Return a console on standard output: without escape sequences where it is piped, or with NO_COLOR."""
    from rich.console import Console

    if not sys.stdout.isatty():
        return Console(width=PIPED_WIDTH, color_system=None, force_terminal=False)
    return Console(color_system=None) if wants_no_color() else Console()


def wants_no_color() -> bool:
    """Whether NO_COLOR is set and not empty (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


def print_json(value: Any, has_version: bool = True) -> None:
    """Print one JSON value, indented. An object's first key is the version of its form.

    `has_version` is False for an object whose keys are all of one kind.
    """
    is_versioned = has_version and isinstance(value, dict)
    versioned = {"json_version": JSON_VERSION, **value} if is_versioned else value
    sys.stdout.write(json.dumps(versioned, indent=2) + "\n")
    sys.stdout.flush()


class Column(NamedTuple):
    """A column of a table. Where a row does not fit, the columns of the highest rank are left out first."""

    title: str
    get: Callable[[Any], Any]  # of a row
    form: Callable[[Any], object] = str  # of what `get` returns
    rank: int = 0  # 0: never left out

    def text(self, row: Any) -> str:
        """Return the row's cell; `-` for None."""
        value = self.get(row)
        return "-" if value is None else printable(str(self.form(value)))


def tuple_columns(*titles: str, optional: Sequence[str] = ()) -> tuple[Column, ...]:
    """Return columns for rows that are tuples; `optional` ones are left out first, the last of them first."""
    ranks = {title: number for number, title in enumerate(optional, 1)}
    return tuple(
        Column(title, itemgetter(number), rank=ranks.get(title, 0)) for number, title in enumerate(titles)
    )


def print_table(
    title: str,
    columns: Sequence[Column],
    rows: Iterable[Any],
    *,
    is_wide: bool = False,
    more: int = 0,
    details: Callable[[Any], Iterable[str]] | None = None,
) -> None:
    """Print a line for each row, or one line if there are none. Numbers are right-aligned.

    A terminal that is too narrow gets fewer columns, unless `is_wide`; one that is too narrow still wraps the
    lines. `more`: how many rows are not given. `details`: of a row, lines to print below it.
    """
    rows, out = list(rows), console()
    if not rows:
        out.print(f"{title}: none", highlight=False)
        return
    from rich.cells import cell_len
    from rich.text import Text

    texts = {column: [column.text(row) for row in rows] for column in columns}
    widths = {
        column: max(cell_len(cell) for cell in (column.title, *cells) if cell_len(cell) <= MAX_ALIGNED)
        for column, cells in texts.items()
    }
    shown = list(columns)
    while not is_wide and sum(widths[column] + GAP for column in shown) - GAP > out.width:
        last = max(reversed(shown), key=lambda column: column.rank)
        if not last.rank:
            break
        shown.remove(last)
    numeric = {column for column in shown if all(_is_number(column.get(row)) for row in rows)}
    out.print(Text(title, style="bold"), soft_wrap=True)
    for number, cells in enumerate(
        zip(*([column.title.upper(), *texts[column]] for column in shown), strict=True)
    ):
        padded = (
            " " * (widths[column] - cell_len(cell)) + cell
            if column in numeric
            else cell + " " * (widths[column] - cell_len(cell))
            for column, cell in zip(shown, cells, strict=True)
        )
        line = (" " * GAP).join(padded).rstrip()
        out.print(Text(line, style="" if number else "dim"), soft_wrap=True)
        for detail in details(rows[number - 1]) if number and details is not None else ():
            out.print(plain_text(detail), soft_wrap=True)
    notes = [f"and {more:,} more"] if more else []
    if hidden := [column.title for column in columns if column not in shown]:
        notes.append(f"a wider terminal, or a pipe, also has: {', '.join(hidden)}")
    if notes:
        out.print(Text(f"({'; '.join(notes)})", style="dim"), soft_wrap=True)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def print_fields(fields: Iterable[tuple[str, str]]) -> None:
    """Print a line for each name and its value."""
    from rich.text import Text

    fields, out = list(fields), console()
    width = max(len(name) for name, _ in fields) + GAP
    for name, value in fields:
        out.print(Text.assemble((f"{name:{width}}", "bold"), plain_text(value)), soft_wrap=True)


def print_line(text: str, style: str = "") -> None:
    """Print a text that the terminal alone breaks: a command in it can be copied and pasted."""
    console().print(plain_text(text), style=style, soft_wrap=True)


def plain_text(value: object) -> Text:
    """Return text that is shown as it is: without markup, and without control characters."""
    from rich.text import Text

    return Text(printable(str(value)))


def printable(text: str, keep: str = "") -> str:
    """Return the text with a mark for each character that is not printable, nor among those to keep."""
    return "".join(c if c.isprintable() or c in keep else "\N{REPLACEMENT CHARACTER}" for c in text)


def format_bytes(count: float) -> str:
    """Return a size: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 rank``, ``2 ranks``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
