"""The results of a run, as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from kvxferd.bench.contenders import TITLES
from kvxferd.bench.figures import Figure, Point, Result
from kvxferd.telemetry.units import format_time
from kvxferd.tooling.output import Column, format_bytes, print_line, print_table


def print_report(result: Result) -> None:
    """Print a table of each measure's points, the figures, and their notes."""
    machine = result.machine
    for measure in dict.fromkeys(point.measure for point in result.points):
        _print_points(
            f"{measure}: medians of rounds, GB/s (10^9 bytes)",
            [point for point in result.points if point.measure == measure],
        )
    ways = {how: number for number, how in enumerate(dict.fromkeys(one.how for one in result.figures), 1)}
    print_table(
        "Figures", (*FIGURE_COLUMNS, Column("taken", lambda one: f"[{ways[one.how]}]")), result.figures
    )
    print_line(
        f"{machine.cores} cores of {machine.processor}, Linux {machine.kernel}, {machine.nixl}; busy "
        f"{machine.busy_before_percent:.0f} % and load {machine.load_before:g} before, load "
        f"{result.load_after:g} after; took {result.seconds:.0f} s"
    )
    for name, title in TITLES.items():
        print_line(f"{name}: {title}")
    for how, number in ways.items():
        print_line(f"[{number}] {how}")


def _print_points(title: str, points: Sequence[Point]) -> None:
    """Print the points of one measure, which all have the fields of the first."""
    first, *_ = points
    own, *_ = first.contenders
    heads: list[tuple[str, Callable[[Any], str], int]] = [
        *((name, str, 0) for name in ("over", *first.case)),
        ("size", format_bytes, 0),
        *((name, "{:.2f}".format, 0) for name in first.contenders),
        *((f"{own} by {other}", "{:.2f}".format, 0) for other in first.ratios),
        *(_fact_head(name) for name in first.facts),
    ]
    columns = [Column(head, itemgetter(n), form, rank) for n, (head, form, rank) in enumerate(heads)]
    rows = [
        (
            point.transport,
            *point.case.values(),
            point.size_bytes,
            *(one.gb_per_s for one in point.contenders.values()),
            *point.ratios.values(),
            *point.facts.values(),
        )
        for point in points
    ]
    print_table(title, columns, rows)


def _fact_head(name: str) -> tuple[str, Callable[[Any], str], int]:
    """Return a fact's title, its form, and the rank of its column: a narrow terminal has none of them."""
    title = name.removesuffix("_s").removesuffix("_share").replace("_", " ")
    if name.endswith("_s"):
        return title, format_time, 1
    return title, "{:.0%}".format if name.endswith("_share") else "{:,}".format, 1


def _measured(figure: Figure) -> str:
    return f"{figure.value:.3g} {figure.unit}".rstrip()


FIGURE_COLUMNS = (
    Column("figure", lambda figure: figure.title),
    Column("measured", _measured),
    Column("aim", lambda figure: figure.aim),
    Column("met", lambda figure: "yes" if figure.met else "NO"),
)
