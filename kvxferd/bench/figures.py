"""Turns measurements into figures. Each has an aim, and states how it was taken."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvxferd.bench.measures.calls import NUM_IDS, Calls
from kvxferd.bench.measures.crossing import CROSSINGS, CrossingPoint
from kvxferd.bench.measures.first_pull import FirstPull
from kvxferd.bench.measures.head_of_line import HeadOfLine
from kvxferd.bench.measures.idle import Idle
from kvxferd.bench.measures.latency import Latency
from kvxferd.bench.measures.progressive import ProgressivePoint
from kvxferd.bench.points import Point, median
from kvxferd.bench.results import Figure
from kvxferd.bench.workload import MIB

SUMMARY = (
    "throughput_ratio_64m",
    "throughput_ratio_4m",
    "added_latency_us_p50",
    "added_latency_us_p99",
    "pull_call_us_p99",
    "first_pull_ms",
    "idle_cpu_percent",
    "small_behind_large_p99_ratio",
    "daemon_rss_mb",
    "mover_private_mb",
    "crossing_ratio",
    "crossing_ratio_lowest",
    "worst_against_direct",
    "handover_ratio",
    "handover_ratio_one_chunk",
)

_MB = 1e6


@dataclass
class Measurements:
    """The results of one run's measures, over the first transport; None for one that did not run."""

    points: list[Point] = field(default_factory=list)
    latency: Latency | None = None
    calls: Calls | None = None
    head_of_line: HeadOfLine | None = None
    idle: Idle | None = None
    first_pulls: list[FirstPull] = field(default_factory=list)  # one for each layout
    crossing: list[CrossingPoint] = field(default_factory=list)
    progressive: list[ProgressivePoint] = field(default_factory=list)


def figures_of(found: Measurements) -> list[Figure]:
    """Return every figure, those of the summary among them."""
    return [
        *_ratios(found.points),
        *_latency(found.latency),
        *_calls(found.calls),
        *_first_pulls(found.first_pulls),
        *_idle(found.idle),
        *_head_of_line(found.head_of_line),
        *_crossing(found.crossing),
        *_progressive(found.progressive),
    ]


def summary_of(figures: Iterable[Figure]) -> dict[str, float | None]:
    """Return the figures of the summary by name; None for one that was not measured."""
    values = {figure.name: figure.value for figure in figures}
    return {name: values.get(name) for name in SUMMARY}


def _at_least(name: str, title: str, value: float, aim: float, how: str, unit: str = "") -> Figure:
    return Figure(
        name=name, title=title, value=value, unit=unit, aim=f"at least {aim:g}", met=value >= aim, how=how
    )


def _at_most(name: str, title: str, value: float, aim: float, how: str, unit: str) -> Figure:
    text = f"at most {aim:g} {unit}".rstrip()
    return Figure(name=name, title=title, value=value, unit=unit, aim=text, met=value <= aim, how=how)


def _ratios(points: list[Point]) -> list[Figure]:
    figures: list[Figure] = []
    if not points:
        return figures
    for name, title, aim, points_of in (
        ("64m", "64 MiB and more", 0.95, [p for p in points if p.size_bytes >= 64 * MIB]),
        ("4m", "4 MiB", 0.85, [p for p in points if p.size_bytes == 4 * MIB]),
    ):
        # A ratio over TCP does not predict one over CMA: like all figures, these use the first transport.
        first = points[0].transport
        chosen = [point for point in points_of if point.in_flight == 1 and point.transport == first]
        if not chosen:
            continue
        ratios = [point.ratio_to_raw for point in chosen]
        lowest = min(chosen, key=lambda point: point.ratio_to_raw)
        rounds = min(point.rounds for point in chosen)
        how = (
            f"{len(chosen)} points over {chosen[0].transport}, one pull at a time, prepared; for each the "
            f"median of {rounds} rounds, interleaved with {', '.join(chosen[0].interleaved_with)}; raw NIXL "
            "timed from post to done"
        )
        figures += [
            _at_least(
                f"throughput_ratio_{name}",
                f"throughput against raw NIXL, {title}: median point",
                median(ratios),
                aim,
                how,
            ),
            _at_least(
                f"throughput_ratio_{name}_lowest",
                f"the same, lowest point ({lowest.shape}, {lowest.lists})",
                min(ratios),
                aim,
                how,
            ),
        ]
    return figures


def _latency(found: Latency | None) -> list[Figure]:
    if found is None:
        return []
    point = found.point
    n = point.contenders["kvxferd"].n
    how = (
        f"{n} pulls of 64 KiB in {point.rounds} rounds, prepared, one at a time, less raw NIXL's median from "
        f"post to done in the same round; interleaved with {', '.join(point.interleaved_with)}"
    )
    return [
        _at_most(
            "added_latency_us_p50", "added latency, 64 KiB, p50", found.added_p50_s * 1e6, 300, how, "us"
        ),
        _at_most(
            "added_latency_us_p99", "added latency, 64 KiB, p99", found.added_p99_s * 1e6, 1000, how, "us"
        ),
    ]


def _calls(found: Calls | None) -> list[Figure]:
    if found is None:
        return []
    how = f"{found.n} calls each in {found.rounds} rounds, int32 buffer, which the client copies"
    one, some, many = NUM_IDS
    return [
        _at_most(name, title, found.p99_s[num] * 1e6, 100, how, "us")
        for name, title, num in (
            ("pull_call_us_p99", f"time inside pull(), {many:,} block ids, p99", many),
            ("pull_call_few_us_p99", f"the same of {some:,}", some),
            ("pull_call_one_us_p99", "the same of one", one),
        )
    ]


def _first_pulls(found: list[FirstPull]) -> list[Figure]:
    figures = []
    for one in found:
        how = (
            f"{len(one.first_s)} first pulls of {one.size_bytes // MIB} MiB, each between daemons and ranks "
            "that were just started"
        )
        name, title = "first_pull_ms", "first pull, no earlier contact"
        if len(found) > 1:
            name, title = f"{name}_{one.layout}", f"{title}, {one.layout}"
        figures.append(_at_most(name, title, one.median_s * 1e3, 500, how, "ms"))
    return figures


def _idle(found: Idle | None) -> list[Figure]:
    if found is None:
        return []
    how = f"{found.ranks} ranks registered, a peer connected, idle for {found.seconds:.0f} s"
    movers = found.mover_private_bytes
    how_movers = f"the largest of {len(movers)}, without the workers' memory that they map; {how}"
    return [
        _at_most(
            "idle_cpu_percent", "idle processor time, daemon and movers", found.cpu_percent, 1, how, "%"
        ),
        _at_most("daemon_rss_mb", "daemon, resident", found.daemon_rss_bytes / _MB, 80, how, "MB"),
        _at_most("mover_private_mb", "a mover, private", max(movers) / _MB, 40, how_movers, "MB"),
    ]


def _head_of_line(found: HeadOfLine | None) -> list[Figure]:
    if found is None:
        return []
    how = (
        f"{found.num_behind} pulls of 64 KiB behind {found.rounds} of {found.large_bytes // MIB} MiB on the "
        f"same rank, {found.num_alone} alone, in turn"
    )
    ratio = found.behind_p99_s / found.alone_p99_s
    return [
        _at_most("small_behind_large_p99_ratio", "64 KiB behind 2 GiB, p99 by p99 alone", ratio, 10, how, ""),
    ]


def _crossing(points: list[CrossingPoint]) -> list[Figure]:
    """Return what auto gains and costs between layouts that differ, over the first transport."""
    of_first = [point for point in points if point.transport == points[0].transport]
    counted = [point for point in of_first if point.is_counted]
    if not counted:
        return []
    how = (
        f"{len(counted)} points over {counted[0].transport}, fragmented lists, prepared, one rank after the "
        "other; for each the median of its rounds, auto, direct and equal layouts in turn"
    )
    lowest = min(counted, key=lambda point: point.auto_to_equal)
    figures = [
        _at_least(
            "crossing_ratio",
            "layouts that differ: auto by equal layouts, median point",
            median([point.auto_to_equal for point in counted]),
            0.4,
            how,
        ),
        _at_least(
            "crossing_ratio_lowest",
            f"the same, lowest point ({lowest.crossing}, {lowest.size_bytes // MIB} MiB)",
            lowest.auto_to_equal,
            0.2,
            how,
        ),
    ]
    fast = [point for point in counted if point.crossing == str(CROSSINGS[0])]
    if fast:
        figures.append(
            _at_least(
                "crossing_speedup_short_runs",
                f"auto by direct, runs of 256 bytes ({fast[-1].crossing}, {fast[-1].size_bytes // MIB} MiB)",
                fast[-1].auto_to_direct,
                12,
                how,
            )
        )
    return figures + _worst_against_direct(of_first)


def _worst_against_direct(points: list[CrossingPoint]) -> list[Figure]:
    """Return the least that auto gains, or the most that it costs, where it made a choice.

    A point that auto read directly throughout differs from direct by chance; so may one of few rounds.
    """
    most_rounds = max(point.rounds for point in points)
    chosen = [point for point in points if point.auto_covered_bytes and point.rounds == most_rounds]
    if not chosen:
        return []
    worst = min(chosen, key=lambda point: point.auto_to_direct)
    return [
        _at_least(
            "worst_against_direct",
            f"auto by direct, worst point ({worst.crossing}, {worst.size_bytes // MIB} MiB)",
            worst.auto_to_direct,
            0.9,
            f"{len(chosen)} points that auto did not read directly throughout; median of {worst.rounds} "
            "alternated pairs",
        )
    ]


def _progressive(points: list[ProgressivePoint]) -> list[Figure]:
    """Return what is waited for after the end, over the first transport."""
    figures: list[Figure] = []
    for point in (point for point in points if point.transport == points[0].transport and point.pace == 1):
        is_one = point.num_chunks == 1
        size = f"{point.chunk_bytes // MIB} MiB"
        chunks = f"one chunk of {size}" if is_one else f"{point.num_chunks} chunks of {size}"
        how = (
            f"{chunks} over {point.transport}, fragmented lists, reported as far apart as the pull takes for "
            f"one; ready() for the last to Delivered, by pull() to Delivered of a whole transfer, prepared; "
            f"median of {point.rounds} rounds, in turn"
        )
        name, aim = ("handover_ratio_one_chunk", 1.05) if is_one else ("handover_ratio", 0.25)
        title = f"handover by a pull after the end, {chunks}"
        figures.append(_at_most(name, title, point.ratio, aim, how, ""))
    return figures
