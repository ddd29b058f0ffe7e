"""A plot of a run: rates by size, kvxferd's share of raw NIXL's, and where a small pull's time goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvxferd.bench.implementations import COPY, ENGINE, KVXFERD, RAW
from kvxferd.bench.points import Point, median
from kvxferd.bench.results import Result
from kvxferd.tooling.output import format_bytes

_COLOURS = {KVXFERD: "#1b6ca8", RAW: "#d1495b", ENGINE: "#edae49", COPY: "#8d96a3"}
_LABELS = {
    KVXFERD: "kvxferd, pull() to Delivered",
    RAW: "raw NIXL, post to done",
    ENGINE: "NIXL as in the engine",
    COPY: "memory copy",
}
_MARKERS = "osD^v<>P"
_LINES = ("-", "--", ":")  # of transports
_AIMS = ((64 << 20, 0.95), (4 << 20, 0.85))


def write_plot(result: Result, path: Path) -> None:
    """Write the plot in the format of the path's suffix, .png or .svg."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = points_to_plot(result.points)
    window = max((point.in_flight for point in drawn), default=1)
    figure, (rates, ratios, threads) = pyplot.subplots(1, 3, figsize=(15, 5.2), layout="constrained")
    _draw_rates(rates, drawn)
    _draw_ratios(ratios, drawn)
    _draw_engine_thread(threads, drawn)
    machine = result.machine
    figure.suptitle(
        f"kvxferd bench: {machine.cores} cores of {machine.processor}, {machine.nixl}, busy "
        f"{machine.busy_before_percent:.0f} % before; medians of interleaved rounds, {window} in flight",
        fontsize=10,
    )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_rates(axes: Any, points: list[Point]) -> None:
    transports = list(dict.fromkeys(point.transport for point in points))
    for number, transport in enumerate(transports):
        for name, colour in _COLOURS.items():
            by_size = rates_by_size(points, name, transport)
            if not by_size:
                continue
            label = _LABELS[name] if len(transports) == 1 else f"{_LABELS[name]}, {transport}"
            middles = [median(rates) for rates in by_size.values()]
            axes.plot(
                list(by_size), middles, color=colour, label=label, linestyle=_LINES[number % len(_LINES)]
            )
            for size, rates in by_size.items():
                axes.scatter([size] * len(rates), rates, color=colour, s=14, alpha=0.6)
    _label(axes, points, "GB/s (10^9 bytes); each dot a shape and list")
    axes.legend(fontsize=8)


def points_to_plot(points: list[Point]) -> list[Point]:
    """Return the throughput points with the fewest pulls in flight, which is usually one."""
    fewest = min((point.in_flight for point in points if point.measure == "throughput"), default=1)
    return [point for point in points if point.in_flight == fewest]


def rates_by_size(points: list[Point], contender: str, transport: str) -> dict[int, list[float]]:
    """Return the rates of one implementation over one transport, in GB/s, smallest size first."""
    found: dict[int, list[float]] = {}
    for point in sorted(points, key=lambda point: point.size_bytes):
        if point.transport == transport and contender in point.contenders:
            found.setdefault(point.size_bytes, []).append(point.contenders[contender].gb_per_s)
    return found


def _draw_ratios(axes: Any, points: list[Point]) -> None:
    kinds = sorted({(point.shape, point.transport) for point in points})
    for number, (shape, transport) in enumerate(kinds):
        mine = [p for p in points if (p.shape, p.transport) == (shape, transport)]
        axes.scatter(
            [point.size_bytes for point in mine],
            [point.ratio_to_raw for point in mine],
            marker=_MARKERS[number % len(_MARKERS)],
            label=f"{shape}, {transport}",
            s=30,
            alpha=0.8,
        )
    for size, aim in _AIMS:
        axes.plot([size / 1.6, size * 1.6], [aim, aim], color="black", linewidth=2)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    _label(axes, points, "throughput by raw NIXL's; bars: aims")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def _draw_engine_thread(axes: Any, points: list[Point]) -> None:
    for name, label in ((KVXFERD, "inside pull()"), (ENGINE, "building and posting in the engine")):
        axes.scatter(
            [point.size_bytes for point in points],
            [point.contenders[name].engine_thread_median_s * 1e6 for point in points],
            color=_COLOURS[name],
            label=label,
            s=22,
        )
    _label(axes, points, "engine thread, us of one request")
    axes.set_yscale("log")
    axes.legend(fontsize=8)


def _label(axes: Any, points: list[Point], what: str) -> None:
    sizes = sorted({point.size_bytes for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [format_bytes(size).replace(".0", "") for size in sizes], rotation=45, fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("bytes of a pull")
    axes.set_title(what, fontsize=9)
    axes.grid(visible=True, alpha=0.3)
