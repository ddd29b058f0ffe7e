"""What measures would return, made up, for tests of what is made of it."""

from kvxferd.bench.cases import BlockPattern, Case, equal_engines
from kvxferd.bench.contenders import ENGINE, KVXFERD, RAW, Round
from kvxferd.bench.figures import HandoverPoint, LayoutsPoint, Machine, Point, Result, at_most, point_of
from kvxferd.bench.measures.layouts import ALL_LAYOUTS, Layouts
from kvxferd.bench.rank import Sample

MIB = 1 << 20


def point(size_bytes: int, seconds: dict[str, list[float]]) -> Point:
    """A point of a shape that does not matter: one request a round, posting takes a tenth."""
    case = Case(equal_engines("d", "qwen3-8b", 1, 64), BlockPattern.SCATTERED, 4)
    rounds = {
        name: [Round([Sample(0.0, 0.0, taken / 10, taken, MIB, 4)], 1) for taken in times]
        for name, times in seconds.items()
    }
    return point_of("throughput", "cma", "qwen3-8b", size_bytes, case, rounds)


def steady(ours: float, raw: float) -> dict[str, list[float]]:
    """Three rounds alike."""
    return {KVXFERD: [ours] * 3, RAW: [raw] * 3, ENGINE: [2 * raw] * 3}


def layouts_point(
    layouts: Layouts, to_direct: float, to_equal: float, not_direct: float, rounds: int = 15
) -> LayoutsPoint:
    """A point of 64 MiB with these ratios."""
    return LayoutsPoint(
        transport="cma",
        engines=str(layouts),
        lists="fragmented",
        size_bytes=64 * MIB,
        bytes=64 * MIB,
        rounds=rounds,
        runs=262_144,
        has_short_runs=layouts.has_short_runs,
        auto_s=0.1,
        direct_s=0.1 * to_direct,
        equal_s=0.1 * to_equal,
        auto_not_direct=not_direct,
        auto_to_direct=to_direct,
        auto_to_equal=to_equal,
    )


def handover_point(num_chunks: int, ratio: float) -> HandoverPoint:
    """A point of chunks of 64 MiB."""
    return HandoverPoint(
        transport="cma",
        num_chunks=num_chunks,
        chunk_bytes=64 * MIB,
        bytes=num_chunks * 64 * MIB,
        rounds=7,
        pace=1.0,
        gap_s=0.02,
        plain_s=0.02 * num_chunks,
        handover_s=0.02 * num_chunks * ratio,
        ratio=ratio,
    )


def result() -> Result:
    """A run with a point of each kind, and a figure that was missed."""
    machine = Machine(
        cores=2,
        processor="a processor",
        kernel="6.18",
        python="3.11",
        kvxferd="0",
        nixl="nixl 1.5.1",
        busy_before_percent=3.0,
        load_before=0.1,
    )
    return Result(
        machine=machine,
        quick=True,
        points=[point(4 * MIB, steady(0.010, 0.009)), point(64 * MIB, steady(0.02, 0.02))],
        layouts=[layouts_point(ALL_LAYOUTS[0], 14.0, 0.5, not_direct=1.0)],
        handovers=[handover_point(8, 0.2)],
        figures=[at_most("added_latency_us_p99", "added latency, 64 KiB, p99", 1200, 1000, "8 pulls", "us")],
    )
