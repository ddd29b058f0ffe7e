"""The results of a run, as tables."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvxferd.bench.implementations import TITLES
from kvxferd.bench.measures.crossing import CrossingPoint
from kvxferd.bench.measures.progressive import ProgressivePoint
from kvxferd.bench.points import Point
from kvxferd.bench.results import Figure, Result
from kvxferd.tooling.output import format_bytes, format_duration


def render_report(result: Result) -> RenderableType:
    """Return the tables and their notes."""
    machine = result.machine
    lines = [
        f"{machine.cores} cores of {machine.processor}, Linux {machine.kernel}, {machine.nixl}; busy "
        f"{machine.busy_before_percent:.0f} % and load {machine.load_before:g} before, load "
        f"{result.load_after:g} after; took {result.seconds:.0f} s",
        *(f"{name}: {title}" for name, title in TITLES.items()),
        *(f"[{number}] {how}" for how, number in _footnotes(result.figures).items()),
    ]
    tables = [_points(result.points)] if result.points else []
    tables += [_crossing(result.crossing)] if result.crossing else []
    tables += [_progressive(result.progressive)] if result.progressive else []
    return Group(*tables, _figures(result.figures), Text("\n".join(lines)))


def _footnotes(figures: list[Figure]) -> dict[str, int]:
    """Return a footnote number for each way in which figures were taken."""
    return {how: number for number, how in enumerate(dict.fromkeys(figure.how for figure in figures), 1)}


def _points(points: list[Point]) -> Table:
    table = Table(title="Points: medians of rounds, GB/s (10^9 bytes)", title_justify="left")
    names = [name for name in TITLES if any(name in point.contenders for point in points)]
    for head in ("over", "shape", "layout", "blocks", "size", "in flight"):
        table.add_column(head)
    for head in ("runs", *names, "by raw", "by engine", "in pull()", "posting"):
        table.add_column(head, justify="right")
    for point in points:
        taken = point.contenders
        table.add_row(
            point.transport,
            point.shape,
            point.layout,
            point.lists,
            format_bytes(point.size_bytes),
            str(point.in_flight),
            f"{taken['kvxferd'].runs:,}",
            *(f"{taken[name].gb_per_s:.2f}" if name in taken else "" for name in names),
            f"{point.ratio_to_raw:.2f}",
            f"{point.ratio_to_engine:.2f}",
            format_duration(taken["kvxferd"].engine_thread_median_s),
            format_duration(taken["engine"].engine_thread_median_s),
        )
    return table


def _crossing(points: list[CrossingPoint]) -> Table:
    table = Table(title="Layouts that differ: medians of rounds, GB/s (10^9 bytes)", title_justify="left")
    for head in ("over", "from and to", "size"):
        table.add_column(head)
    for head in ("runs", "auto", "direct", "equal layouts", "auto by direct", "by equal", "not direct"):
        table.add_column(head, justify="right")
    for point in points:
        seconds = (point.auto_s, point.direct_s, point.equal_s)
        table.add_row(
            point.transport,
            point.crossing,
            format_bytes(point.size_bytes),
            f"{point.runs:,}",
            *(f"{point.bytes / one / 1e9:.2f}" for one in seconds),
            f"{point.auto_to_direct:.2f}",
            f"{point.auto_to_equal:.2f}",
            f"{point.auto_covered_bytes / (point.bytes * point.rounds):.0%}",
        )
    return table


def _progressive(points: list[ProgressivePoint]) -> Table:
    table = Table(title="Pulls while chunks are written: medians of rounds", title_justify="left")
    for head in ("over", "chunks"):
        table.add_column(head)
    for head in ("a chunk each", "pace", "pull after the end", "handover", "handover by pull"):
        table.add_column(head, justify="right")
    for point in points:
        table.add_row(
            point.transport,
            f"{point.num_chunks} of {format_bytes(point.chunk_bytes)}",
            format_duration(point.gap_s),
            f"{point.pace:g}",
            *map(format_duration, (point.plain_s, point.handover_s)),
            f"{point.ratio:.2f}",
        )
    return table


def _figures(figures: list[Figure]) -> Table:
    table = Table(title="Figures", title_justify="left")
    table.add_column("figure")
    table.add_column("measured", justify="right")
    table.add_column("aim")
    table.add_column("met")
    table.add_column("taken")
    ways = _footnotes(figures)
    for figure in figures:
        met = Text("yes") if figure.met else Text("NO", style="red")
        value = f"{figure.value:.3g} {figure.unit}".rstrip()
        table.add_row(Text(figure.title), value, figure.aim, met, Text(f"[{ways[figure.how]}]"))
    return table
