"""Output of verbs: tables for people, one JSON object for machines.

Nothing is cut to fit: a table whose words do not all fit beside one another is printed row by row, a line
for each value, which the terminal wraps as it likes.

rich is imported where it is used: a completion of the shell's needs the verbs, and shows no table.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

# Piped output is for grep: wide enough that no row wraps. An id has at most 256 characters, an error's
# message 4,096, and a row a dozen of them.
PIPED_WIDTH = 1 << 17
# Of all `--json`: raised when a key goes away or means something else. Keys are added without.
JSON_VERSION = 1
# A column of longer texts is at least this wide: one word a line is harder to read than a list.
READABLE_WIDTH = 14


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


def print_table(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table, or one line if there are no rows. Numbers are right-aligned."""
    rows = [list(row) for row in rows]
    if not rows:
        console().print(f"{title}: none", highlight=False)
        return
    from rich.table import Table

    table = Table(title=title)
    for column, head in enumerate(heads):
        numeric = all(isinstance(row[column], int | float) for row in rows)
        table.add_column(head, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(plain_text(cell) for cell in row))
    print_fitted(console(), table)


def print_fields(fields: Iterable[tuple[str, str]]) -> None:
    """Print a line for each name and its value."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, value in fields:
        table.add_row(Text(name, style="bold"), plain_text(value))
    print_fitted(console(), table)


def print_line(text: str) -> None:
    """Print a text that the terminal alone breaks: a command in it can be copied and pasted."""
    console().print(plain_text(text), soft_wrap=True)


def print_fitted(out: Console, *parts: RenderableType) -> None:
    """Print the parts. A table becomes as narrow as its longest words allow, else a list of its rows."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    for part in parts:
        if isinstance(part, Group):
            print_fitted(out, *part.renderables)
            continue
        if not isinstance(part, Table):
            out.print(part)
            continue
        title, part.title = part.title, None
        if title is not None:
            out.print(Text(str(title), style="table.title"), soft_wrap=True)
        if _is_piped(out):
            _print_piped(out, part)
        elif _fit_columns(out, part):
            out.print(part)
        else:
            for line in _rows_as_lists(part):
                out.print(line, soft_wrap=True)


def _is_piped(out: Console) -> bool:
    return not out.is_terminal and out.width == PIPED_WIDTH


def _print_piped(out: Console, table: Table) -> None:
    """Print a row a line, without the blanks that would make it as long as the longest row."""
    table.show_edge = False
    with out.capture() as capture:
        out.print(table)
    for line in capture.get().splitlines():
        out.out(line.rstrip(), highlight=False)


def _fit_columns(out: Console, table: Table) -> bool:
    """Set the width of each column so that no word is broken. False if the console is too narrow for that."""
    from rich.measure import Measurement

    unlimited = out.options.update(width=PIPED_WIDTH)
    columns = [
        [Measurement.get(out, unlimited, cell) for cell in _header_and_cells(column, table)]
        for column in table.columns
    ]
    most = [max((cell.maximum for cell in column), default=0) for column in columns]
    words = [max((cell.minimum for cell in column), default=0) for column in columns]
    least = [max(word, min(longest, READABLE_WIDTH)) for word, longest in zip(words, most, strict=True)]
    borders = Measurement.get(out, unlimited, table).maximum - sum(most)
    room = out.width - borders
    if sum(least) > room:
        return False
    for column, width in zip(table.columns, share_width(least, most, room), strict=True):
        column.width = width
    return True


def share_width(least: Sequence[int], most: Sequence[int], room: int) -> list[int]:
    """Return widths between `least` and `most` that take at most `room`, the narrower columns first.

    `room` is at least the sum of `least`.
    """
    widths = list(least)
    spare = room - sum(least)
    steps = sorted({*least, *most})
    # Raise the narrowest columns together, from each length to the next.
    for low, high in pairwise(steps):
        growing = [i for i, width in enumerate(widths) if width == low < most[i]]
        growth = min((high - low) * len(growing), spare)
        for place, i in enumerate(growing):
            widths[i] += growth // len(growing) + (place < growth % len(growing))
        spare -= growth
    return widths


def _header_and_cells(column: Any, table: Table) -> Iterator[RenderableType]:
    if table.show_header:
        yield column.header
    yield from column.cells


def _rows_as_lists(table: Table) -> Iterator[Text]:
    """Yield for each row a line of name and value for each cell, and an empty line between two rows."""
    from rich.cells import cell_len
    from rich.text import Text

    heads = [str(column.header) if table.show_header else "" for column in table.columns]
    margin = max(map(cell_len, heads), default=0)
    for number, row in enumerate(zip(*(column.cells for column in table.columns), strict=True)):
        if number and margin:
            yield Text()
        if not margin:  # a grid of names and values
            yield Text("  ").join(map(_as_text, row))
            continue
        for head, value in zip(heads, row, strict=True):
            padding = " " * (margin - cell_len(head) + 2)
            yield Text.assemble(("  " + head, "bold"), padding, _as_text(value))


def _as_text(cell: RenderableType) -> Text:
    from rich.text import Text

    return cell if isinstance(cell, Text) else Text(str(cell))


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


def format_duration(seconds: float) -> str:
    """Return a duration with three digits: ``12.3 ms``."""
    for limit, scale, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if abs(seconds) < limit:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.1f} s"
