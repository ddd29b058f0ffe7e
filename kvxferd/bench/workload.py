"""How much is measured: everything that was requested, or the least that fills the summary."""

from __future__ import annotations

from dataclasses import dataclass

from kvxferd.bench.cases import BlockPattern
from kvxferd.mover.ucx_settings import tls_with_cuda

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

SMALL_BYTES = 64 * KIB
LARGE_BYTES = 2 * GIB
FIRST_BYTES = 64 * MIB
ALL_SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, 2 * GIB)
ALL_IN_FLIGHT = (1, 8, 64)
TRANSPORT_ENVIRONMENTS: dict[str, dict[str, str]] = {
    # For processes of one user on one machine. UCX sets up connections over TCP here too.
    "cma": {"UCX_TLS": tls_with_cuda("cma,posix,sysv,self,tcp")},
    "tcp": {"UCX_TLS": tls_with_cuda("tcp,self")},
    # As the environment sets it: for two machines, and for machines with a network card.
    "any": {},
}


@dataclass(frozen=True)
class ThroughputPoint:
    """One point of the throughput measure."""

    shape: str
    lists: BlockPattern
    size_bytes: int
    in_flight: int
    layout: str = "HND"


@dataclass(frozen=True)
class CrossingSize:
    """A size of the crossing measure: of one request, over all ranks that pull."""

    size_bytes: int
    rounds: int
    transports: tuple[str, ...] = tuple(TRANSPORT_ENVIRONMENTS)


@dataclass(frozen=True)
class ProgressiveSize:
    """A transfer of the progressive measure: so many chunks of so many bytes.

    `pace`: the time between two chunks, divided by what the plain pull takes for one.
    """

    num_chunks: int
    chunk_bytes: int
    rounds: int
    pace: float = 1.0


# So many pairs of pulls are alternated for a median of their ratios.
CROSSING_ROUNDS = 15
QUICK_CROSSING = (CrossingSize(64 * MIB, CROSSING_ROUNDS),)
FULL_CROSSING = (
    CrossingSize(4 * MIB, CROSSING_ROUNDS),
    CrossingSize(64 * MIB, CROSSING_ROUNDS),
    CrossingSize(GIB, 3, ("cma",)),
)


@dataclass(frozen=True)
class Workload:
    """The rounds and requests of every measure, and the points of throughput."""

    points: tuple[ThroughputPoint, ...]
    rounds: int
    small_per_round: int  # pulls of 64 KiB, one after the other
    calls_per_round: int  # of pull(), for each number of block ids
    first_rounds: int  # each with daemons of its own
    head_of_line_pulls: int  # small ones prepared for one large
    head_of_line_bytes: int
    idle_s: float
    crossing: tuple[CrossingSize, ...] = ()
    progressive: tuple[ProgressiveSize, ...] = ()
    layouts: tuple[str, ...] = ("HND",)  # of both sides: throughput, first pulls, and crossing if several


def progressive_sizes(rounds: int) -> tuple[ProgressiveSize, ...]:
    """Return prompts of several chunks, and one of a single chunk, for which nothing can be gained."""
    chunk_bytes = 64 * MIB
    return (
        ProgressiveSize(8, chunk_bytes, rounds),
        ProgressiveSize(8, chunk_bytes, rounds, pace=1.5),  # reading keeps up with ease
        ProgressiveSize(1, chunk_bytes, rounds),
    )


def quick_workload() -> Workload:
    """Return the least that fills the summary, with rounds enough for a median."""
    pulls = [
        ThroughputPoint("llama-3-70b", lists, size, 1)
        for size in (4 * MIB, 64 * MIB)
        for lists in BlockPattern
    ]
    pulls += [
        ThroughputPoint(shape, BlockPattern.FRAGMENTED, size, 1)
        for shape in ("qwen3-8b", "deepseek-v3")
        for size in (4 * MIB, 64 * MIB)
    ]
    pulls.append(ThroughputPoint("mamba2-hybrid", BlockPattern.FRAGMENTED, 64 * MIB, 1))
    return Workload(tuple(pulls), 7, 150, 60, 7, 600, LARGE_BYTES, 5.0, QUICK_CROSSING, progressive_sizes(7))


def full_workload(
    shapes: tuple[str, ...],
    sizes: tuple[int, ...],
    lists: tuple[BlockPattern, ...],
    in_flight: tuple[int, ...],
    rounds: int,
    layouts: tuple[str, ...] = ("HND",),
) -> Workload:
    """Return all combinations, without those that do not fit into memory at the same time."""
    pulls = tuple(
        ThroughputPoint(shape, one, size, window, layout)
        for shape in shapes
        for layout in layouts
        for size in sizes
        for one in lists
        for window in in_flight
        if size * window <= LARGE_BYTES
    )
    return Workload(
        pulls,
        rounds,
        150,
        60,
        max(7, rounds),
        2000,
        LARGE_BYTES,
        20.0,
        FULL_CROSSING,
        progressive_sizes(rounds),
        layouts,
    )
