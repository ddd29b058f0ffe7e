"""How much is measured: everything that was requested, or the least that has every figure."""

from __future__ import annotations

from dataclasses import dataclass

from kvxferd.bench.cases import GIB, KIB, MIB, BlockPattern

SMALL_BYTES = 64 * KIB
LARGE_BYTES = 2 * GIB
FIRST_BYTES = 64 * MIB
ALL_IN_FLIGHT = (1, 8, 64)
# Memory beside the regions: workers, movers, baselines.
HEADROOM_BYTES = 2 * GIB


@dataclass(frozen=True)
class ThroughputPulls:
    """What one point of the throughput measure pulls."""

    shape: str
    pattern: BlockPattern
    size_bytes: int
    in_flight: int


@dataclass(frozen=True)
class LayoutsSize:
    """A size of the layouts measure: of one request, over all ranks that pull."""

    size_bytes: int
    rounds: int = 15  # so many pairs of pulls alternate for a median of their ratios
    transports: tuple[str, ...] = ("cma", "tcp", "any")


@dataclass(frozen=True)
class HandoverSize:
    """A transfer of the handover measure: so many chunks of so many bytes.

    `pace`: the time between two chunks, divided by what the plain pull takes for one.
    """

    num_chunks: int
    chunk_bytes: int = 64 * MIB
    pace: float = 1.0


@dataclass(frozen=True)
class Workload:
    """The rounds and requests of every measure, and what throughput pulls. Defaults are the quick run's."""

    throughput: tuple[ThroughputPulls, ...]
    rounds: int = 7
    small_per_round: int = 150  # pulls of 64 KiB, one after the other
    calls_per_round: int = 60  # of pull(), for each number of block ids
    first_rounds: int = 7  # each with daemons of its own
    behind_pulls: int = 600  # small ones prepared for one large
    behind_bytes: int = LARGE_BYTES
    idle_s: float = 5.0
    layouts_sizes: tuple[LayoutsSize, ...] = (LayoutsSize(64 * MIB),)
    # Prompts of several chunks, at a pace that reading keeps up with just so and with ease; and one of a
    # single chunk, for which nothing can be gained.
    handover_sizes: tuple[HandoverSize, ...] = (HandoverSize(8), HandoverSize(8, pace=1.5), HandoverSize(1))


def quick_workload() -> Workload:
    """Return the least that has every figure, with rounds enough for a median."""
    sizes = (4 * MIB, 64 * MIB)
    pulls = [ThroughputPulls("llama-3-70b", pattern, size, 1) for size in sizes for pattern in BlockPattern]
    for shape in ("qwen3-8b", "deepseek-v3"):
        pulls += [ThroughputPulls(shape, BlockPattern.FRAGMENTED, size, 1) for size in sizes]
    pulls.append(ThroughputPulls("mamba2-hybrid", BlockPattern.FRAGMENTED, 64 * MIB, 1))
    return Workload(tuple(pulls))


def full_workload(shapes: tuple[str, ...], sizes: tuple[int, ...]) -> Workload:
    """Return all combinations, without those that do not fit into memory at the same time."""
    pulls = tuple(
        ThroughputPulls(shape, pattern, size, window)
        for shape in shapes
        for size in sizes
        for pattern in BlockPattern
        for window in ALL_IN_FLIGHT
        if size * window <= LARGE_BYTES
    )
    differing = (LayoutsSize(4 * MIB), LayoutsSize(64 * MIB), LayoutsSize(GIB, 3, ("cma",)))
    return Workload(pulls, behind_pulls=2000, idle_s=20.0, layouts_sizes=differing)
