"""The results of a run, as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvxferd.bench.contenders import ENGINE, KVXFERD, TITLES
from kvxferd.bench.figures import Figure, Point, Result
from kvxferd.tooling.output import format_bytes, format_duration

# Of a table: heads and cells of columns of words, then those of numbers.
Columns = dict[str, Callable[[Any], str]]


def _rate_of(contender: str, point: Point) -> str:
    return f"{point.contenders[contender].gb_per_s:.2f}"


_POINTS: tuple[Columns, Columns] = (
    {
        "over": lambda p: p.transport,
        "shape": lambda p: p.shape,
        "layout": lambda p: p.layout,
        "blocks": lambda p: p.lists,
        "size": lambda p: format_bytes(p.size_bytes),
        "in flight": lambda p: str(p.in_flight),
    },
    {
        "runs": lambda p: f"{p.contenders[KVXFERD].runs:,}",
        **{name: partial(_rate_of, name) for name in TITLES},
        "by raw": lambda p: f"{p.ratio_to_raw:.2f}",
        "by engine": lambda p: f"{p.ratio_to_engine:.2f}",
        "in pull()": lambda p: format_duration(p.contenders[KVXFERD].engine_thread_median_s),
        "posting": lambda p: format_duration(p.contenders[ENGINE].engine_thread_median_s),
    },
)
_LAYOUTS: tuple[Columns, Columns] = (
    {
        "over": lambda p: p.transport,
        "from and to": lambda p: p.engines,
        "size": lambda p: format_bytes(p.size_bytes),
    },
    {
        "runs": lambda p: f"{p.runs:,}",
        "auto": lambda p: f"{p.bytes / p.auto_s / 1e9:.2f}",
        "direct": lambda p: f"{p.bytes / p.direct_s / 1e9:.2f}",
        "equal layouts": lambda p: f"{p.bytes / p.equal_s / 1e9:.2f}",
        "auto by direct": lambda p: f"{p.auto_to_direct:.2f}",
        "by equal": lambda p: f"{p.auto_to_equal:.2f}",
        "not direct": lambda p: f"{p.auto_not_direct:.0%}",
    },
)
_HANDOVERS: tuple[Columns, Columns] = (
    {
        "over": lambda p: p.transport,
        "chunks": lambda p: f"{p.num_chunks} of {format_bytes(p.chunk_bytes)}",
    },
    {
        "a chunk each": lambda p: format_duration(p.gap_s),
        "pace": lambda p: f"{p.pace:g}",
        "pull after the end": lambda p: format_duration(p.plain_s),
        "handover": lambda p: format_duration(p.handover_s),
        "handover by pull": lambda p: f"{p.ratio:.2f}",
    },
)


def render_report(result: Result) -> RenderableType:
    """Return the tables and their notes."""
    machine = result.machine
    ways = {how: number for number, how in enumerate(dict.fromkeys(one.how for one in result.figures), 1)}
    lines = [
        f"{machine.cores} cores of {machine.processor}, Linux {machine.kernel}, {machine.nixl}; busy "
        f"{machine.busy_before_percent:.0f} % and load {machine.load_before:g} before, load "
        f"{result.load_after:g} after; took {result.seconds:.0f} s",
        *(f"{name}: {title}" for name, title in TITLES.items()),
        *(f"[{number}] {how}" for how, number in ways.items()),
    ]
    tables = [
        _table(f"{title}: medians of rounds{unit}", columns, points)
        for title, unit, columns, points in (
            ("Points", ", GB/s (10^9 bytes)", _POINTS, result.points),
            ("Layouts that differ", ", GB/s (10^9 bytes)", _LAYOUTS, result.layouts),
            ("Pulls while chunks are written", "", _HANDOVERS, result.handovers),
        )
        if points
    ]
    return Group(*tables, _figures(result.figures, ways), Text("\n".join(lines)))


def _table(title: str, columns: tuple[Columns, Columns], points: Sequence[object]) -> Table:
    table = Table(title=title, title_justify="left")
    words, numbers = columns
    for head in words:
        table.add_column(head)
    for head in numbers:
        table.add_column(head, justify="right")
    for point in points:
        table.add_row(*(cell(point) for cell in (words | numbers).values()))
    return table


def _figures(figures: Sequence[Figure], ways: dict[str, int]) -> Table:
    table = Table(title="Figures", title_justify="left")
    for head in ("figure", "measured", "aim", "met", "taken"):
        table.add_column(head, justify="right" if head == "measured" else "left")
    for figure in figures:
        met = Text("yes") if figure.met else Text("NO", style="red")
        value = f"{figure.value:.3g} {figure.unit}".rstrip()
        table.add_row(Text(figure.title), value, figure.aim, met, Text(f"[{ways[figure.how]}]"))
    return table
