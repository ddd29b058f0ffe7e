"""The results of a run, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvxferd.bench.contenders import TITLES
from kvxferd.bench.figures import Figure, Point, Result
from kvxferd.tooling.output import format_bytes, format_duration


def render_report(result: Result) -> RenderableType:
    """Return a table of each measure's points, the figures, and their notes."""
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
        _points([point for point in result.points if point.measure == measure])
        for measure in dict.fromkeys(point.measure for point in result.points)
    ]
    return Group(*tables, _figures(result.figures, ways), Text("\n".join(lines)))


def _points(points: Sequence[Point]) -> Table:
    first = points[0]
    title = f"{first.measure}: medians of rounds, GB/s (10^9 bytes)"
    table = Table(title=title, title_justify="left")
    for head in ("over", *first.case, "size"):
        table.add_column(head)
    own, *_ = first.contenders
    facts = (name.removesuffix("_s").removesuffix("_share").replace("_", " ") for name in first.facts)
    for head in (*first.contenders, *(f"{own} by {other}" for other in first.ratios), *facts):
        table.add_column(head, justify="right")
    for point in points:
        table.add_row(
            point.transport,
            *point.case.values(),
            format_bytes(point.size_bytes),
            *(f"{one.gb_per_s:.2f}" for one in point.contenders.values()),
            *(f"{ratio:.2f}" for ratio in point.ratios.values()),
            *(_format_fact(name, value) for name, value in point.facts.items()),
        )
    return table


def _format_fact(name: str, value: float) -> str:
    if name.endswith("_s"):
        return format_duration(value)
    return f"{value:.0%}" if name.endswith("_share") else f"{value:,}"


def _figures(figures: Sequence[Figure], ways: dict[str, int]) -> Table:
    table = Table(title="Figures", title_justify="left")
    for head in ("figure", "measured", "aim", "met", "taken"):
        table.add_column(head, justify="right" if head == "measured" else "left")
    for figure in figures:
        met = Text("yes") if figure.met else Text("NO", style="red")
        value = f"{figure.value:.3g} {figure.unit}".rstrip()
        table.add_row(Text(figure.title), value, figure.aim, met, Text(f"[{ways[figure.how]}]"))
    return table
