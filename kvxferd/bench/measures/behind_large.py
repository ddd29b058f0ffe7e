"""Small pulls while a large one runs on the same rank."""

from __future__ import annotations

from collections.abc import Iterator

from kvxferd.bench.cases import (
    BLOCKS_PER_RUN,
    MIB,
    BlockPattern,
    Case,
    blocks_for,
    equal_engines,
    with_pool,
)
from kvxferd.bench.contenders import KvxferdPulls, interleave, write_content
from kvxferd.bench.figures import Finding, at_most, percentile
from kvxferd.bench.rank import BenchRank, Sample
from kvxferd.bench.testbed import RunningEngines, Site, Testbed
from kvxferd.bench.workload import SMALL_BYTES, Workload

SHAPE = "llama-3-70b"
# A block of eight layers is 64 KiB: one block, and as many as make 2 GiB, in one pool.
LAYERS = 8
_NUM_SLOTS = 8


def measure_behind_large(site: Site, workload: Workload) -> Iterator[Finding]:
    """Measure pulls of 64 KiB, alone and behind a large one, in turn."""
    sized = equal_engines("sized", SHAPE, LAYERS)
    small_blocks, large_blocks = (blocks_for(sized, size) for size in (SMALL_BYTES, workload.behind_bytes))
    room = _NUM_SLOTS * BLOCKS_PER_RUN * small_blocks
    pair = with_pool(sized, "behind", room + large_blocks)
    small = Case(pair, BlockPattern.CONTIGUOUS, small_blocks, _NUM_SLOTS)
    large = Case(pair, BlockPattern.FRAGMENTED, large_blocks, first_block=room)
    alone: list[float] = []
    behind: list[float] = []
    with Testbed.open(site) as testbed, testbed.engines(pair) as engines:
        KvxferdPulls(engines, large).move(1, 1)  # every page is mapped
        by_themselves = KvxferdPulls(engines, small)
        for _ in range(workload.rounds):
            (taken,) = interleave([by_themselves], 1, workload.small_per_round)[by_themselves.name]
            alone += [sample.seconds for sample in taken.samples]
            behind += [sample.seconds for sample in _pull_behind(engines, large, small, workload)]
    how = (
        f"{len(behind)} pulls of 64 KiB behind {workload.rounds} of {workload.behind_bytes // MIB} MiB on "
        f"the same rank, {len(alone)} alone, in turn"
    )
    ratio = percentile(behind, 99) / percentile(alone, 99)
    yield at_most("small_behind_large_p99_ratio", "64 KiB behind 2 GiB, p99 by p99 alone", ratio, 10, how)


def _pull_behind(engines: RunningEngines, large: Case, small: Case, workload: Workload) -> list[Sample]:
    """Return the samples of small pulls that began while the large one ran; both are compared."""
    numbers = [write_content(engines, large, large.ends_of), write_content(engines, small)]
    batches = [
        engines.publish_prepared(large, 1),
        engines.publish_prepared(small, workload.behind_pulls),
    ]
    _, *samples = engines.sink.call(BenchRank.pull_behind, *batches)
    engines.sink.call(BenchRank.abandon_from, batches[1], len(samples))
    for batch in batches:
        engines.release(batch)
    engines.require_right(large, numbers[0], 1, large.ends_of)
    engines.require_right(small, numbers[1], min(len(samples), small.slots))
    return samples
