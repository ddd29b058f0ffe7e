"""What measures would return, made up, for tests of what is made of it."""

from kvxferd.bench.cases import BlockPattern, Case
from kvxferd.bench.figures import Measurements, figures_of, summary_of
from kvxferd.bench.implementations import ENGINE, KVXFERD, RAW
from kvxferd.bench.measures.calls import NUM_IDS, Calls
from kvxferd.bench.measures.crossing import CROSSINGS, Crossing, CrossingPoint
from kvxferd.bench.measures.first_pull import FirstPull
from kvxferd.bench.measures.head_of_line import HeadOfLine
from kvxferd.bench.measures.idle import Idle
from kvxferd.bench.measures.latency import Latency
from kvxferd.bench.measures.progressive import ProgressivePoint
from kvxferd.bench.points import Point, point_of
from kvxferd.bench.results import Machine, Result
from kvxferd.bench.rounds import Round, Rounds
from kvxferd.bench.samples import Sample
from kvxferd.bench.shapes import BenchDeployment

MIB = 1 << 20


def a_case() -> Case:
    """One that does not matter."""
    deployment = BenchDeployment(name="d", shape="qwen3-8b", layers=1, pool_blocks=64)
    return Case(deployment=deployment, lists=BlockPattern.SCATTERED, blocks=4)


def rounds(case: Case, seconds: dict[str, list[float]]) -> Rounds:
    """One request a round, of so many seconds; posting takes a tenth."""
    return Rounds(
        case,
        1,
        {
            name: [Round([Sample(0.0, 0.0, taken / 10, taken, MIB, 4)], 1) for taken in times]
            for name, times in seconds.items()
        },
    )


def point(
    size_bytes: int, seconds: dict[str, list[float]], measure: str = "throughput", transport: str = "cma"
) -> Point:
    """A point of a shape that does not matter."""
    case = a_case()
    return point_of(measure, transport, size_bytes, case, rounds(case, seconds))


def steady(ours: float, raw: float) -> dict[str, list[float]]:
    """Three rounds alike."""
    return {KVXFERD: [ours] * 3, RAW: [raw] * 3, ENGINE: [2 * raw] * 3}


def findings() -> Measurements:
    """Every measure, with figures that can be worked out by hand."""
    small = point(64 << 10, steady(0.001, 0.0005), "latency")
    return Measurements(
        points=[
            small,
            point(4 * MIB, steady(0.010, 0.009)),
            point(64 * MIB, steady(0.020, 0.020)),
            point(64 * MIB, steady(0.020, 0.010)),
            point(256 * MIB, steady(0.020, 0.019)),
        ],
        latency=Latency(small, 250e-6, 1200e-6),
        calls=Calls(rounds=7, n=210, p99_s={num: 25e-6 + num * 1e-9 for num in NUM_IDS}),
        head_of_line=HeadOfLine(2 << 30, 7, 420, 700, 0.002, 0.016),
        idle=Idle(8, 5.0, 0.01, 76_000_000, [9_000_000, 16_000_000]),
        first_pulls=[FirstPull(64 * MIB, "HND", [0.09, 0.3, 0.1])],
        crossing=[
            crossing_point(CROSSINGS[0], 14.0, 0.5, covered=1.0),
            crossing_point(CROSSINGS[1], 12.0, 0.4, covered=1.0),
            crossing_point(CROSSINGS[2], 0.95, 0.3, covered=0.5),
            crossing_point(CROSSINGS[4], 0.7, 0.6, covered=0.0),  # by chance: read directly throughout
            crossing_point(CROSSINGS[-1], 0.98, 0.1, covered=0.1),
            crossing_point(CROSSINGS[0], 0.1, 0.01, covered=1.0, transport="tcp"),
            crossing_point(CROSSINGS[-1], 0.5, 0.1, covered=1.0, rounds=3),
        ],
        progressive=[
            progressive_point(8, 0.2),
            progressive_point(1, 1.1),
            progressive_point(8, 0.15, pace=1.5),
            progressive_point(8, 0.9, transport="tcp"),
        ],
    )


def crossing_point(
    crossing: Crossing,
    to_direct: float,
    to_equal: float,
    covered: float,
    transport: str = "cma",
    rounds: int = 15,
) -> CrossingPoint:
    """A point of 64 MiB with these ratios."""
    return CrossingPoint(
        transport=transport,
        crossing=str(crossing),
        lists="fragmented",
        size_bytes=64 * MIB,
        bytes=64 * MIB,
        rounds=rounds,
        runs=262_144,
        is_counted=crossing.has_short_runs,
        auto_s=0.1,
        direct_s=0.1 * to_direct,
        equal_s=0.1 * to_equal,
        auto_covered_bytes=int(covered * rounds * 64 * MIB),
        auto_to_direct=to_direct,
        auto_to_equal=to_equal,
    )


def progressive_point(
    num_chunks: int, ratio: float, transport: str = "cma", pace: float = 1.0
) -> ProgressivePoint:
    """A point of chunks of 64 MiB."""
    return ProgressivePoint(
        transport=transport,
        num_chunks=num_chunks,
        chunk_bytes=64 * MIB,
        bytes=num_chunks * 64 * MIB,
        rounds=7,
        pace=pace,
        gap_s=0.02 * pace,
        plain_s=0.02 * num_chunks,
        handover_s=0.02 * num_chunks * ratio,
        ratio=ratio,
    )


def result() -> Result:
    """A whole run."""
    found = findings()
    figures = figures_of(found)
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
        seconds=100.0,
        load_after=0.2,
        points=found.points,
        crossing=found.crossing,
        progressive=found.progressive,
        figures=figures,
        summary=summary_of(figures),
    )
