"""What measures would return, made up, for tests of what is made of it."""

from kvxferd.bench.cases import BlockPattern, Case, equal_engines
from kvxferd.bench.contenders import ENGINE, KVXFERD, RAW, Round, Rounds
from kvxferd.bench.figures import Machine, Point, Result, at_most, point_of
from kvxferd.bench.measures.handover import PROGRESSIVE
from kvxferd.bench.measures.layouts import ALL_LAYOUTS, AUTO, DIRECT, EQUAL, Layouts
from kvxferd.bench.measures.throughput import kvxferd_point
from kvxferd.bench.rank import Sample
from kvxferd.bench.workload import HandoverSize

MIB = 1 << 20


def point(size_bytes: int, seconds: dict[str, list[float]]) -> Point:
    """A point of a shape that does not matter: one request a round, posting takes a tenth."""
    case = Case(equal_engines("d", "qwen3-8b", 1, 64), BlockPattern.SCATTERED, 4)
    return kvxferd_point("throughput", "cma", "qwen3-8b", size_bytes, case, rounds_of(seconds))


def rounds_of(seconds: dict[str, list[float]]) -> Rounds:
    """Rounds of one request of a MiB, which takes so many seconds."""
    return {
        name: [Round([Sample(0.0, 0.0, taken / 10, taken, MIB, 4)], 1, 1) for taken in times]
        for name, times in seconds.items()
    }


def steady(ours: float, raw: float) -> dict[str, list[float]]:
    """Three rounds alike."""
    return {KVXFERD: [ours] * 3, RAW: [raw] * 3, ENGINE: [2 * raw] * 3}


def layouts_point(
    layouts: Layouts, to_direct: float, to_equal: float, not_direct: float, rounds: int = 15
) -> tuple[Layouts, Point]:
    """A point of 64 MiB with these ratios."""
    found = rounds_of(
        {AUTO: [0.1] * rounds, DIRECT: [0.1 * to_direct] * rounds, EQUAL: [0.1 * to_equal] * rounds}
    )
    facts = {"runs": 262_144, "not_direct_share": not_direct}
    return layouts, point_of("layouts", "cma", {"from and to": str(layouts)}, 64 * MIB, found, facts)


def handover_point(num_chunks: int, ratio: float) -> tuple[Point, HandoverSize]:
    """A point of chunks of 64 MiB."""
    size = HandoverSize(num_chunks)
    found = rounds_of({KVXFERD: [0.02 * num_chunks] * 7, PROGRESSIVE: [0.02 * num_chunks * ratio] * 7})
    words = {"chunks": f"{num_chunks} chunks of 64.0 MiB", "pace": "1"}
    return point_of("handover", "cma", words, num_chunks * 64 * MIB, found, {"handover_s": 0.02}), size


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
        points=[
            point(4 * MIB, steady(0.010, 0.009)),
            point(64 * MIB, steady(0.02, 0.02)),
            layouts_point(ALL_LAYOUTS[0], 14.0, 0.5, not_direct=1.0)[1],
            handover_point(8, 0.2)[0],
        ],
        figures=[at_most("added_latency_us_p99", "added latency, 64 KiB, p99", 1200, 1000, "8 pulls", "us")],
    )
