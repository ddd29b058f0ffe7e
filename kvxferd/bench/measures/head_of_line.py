"""Small pulls while a large one runs on the same rank."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvxferd.bench.cases import BLOCKS_PER_RUN, BlockPattern, Case, blocks_for
from kvxferd.bench.content import UNSTAMPED
from kvxferd.bench.implementations import KvxferdPulls
from kvxferd.bench.points import percentile
from kvxferd.bench.rank_process import BenchRank
from kvxferd.bench.rounds import verify_all_bytes
from kvxferd.bench.samples import Sample
from kvxferd.bench.shapes import BenchDeployment
from kvxferd.bench.testbed import RunningEngines, Testbed
from kvxferd.bench.workload import SMALL_BYTES, Workload

SHAPE = "llama-3-70b"
# A block of eight layers is 64 KiB: one block, and as many as make 2 GiB, in one pool.
LAYERS = 8
_SMALL_SLOTS = 8
_FIRST_NONCE = 1 << 20  # a nonce that was not used before


@dataclass(frozen=True)
class HeadOfLine:
    """The results in seconds."""

    large_bytes: int
    rounds: int
    num_alone: int
    num_behind: int
    alone_p99_s: float
    behind_p99_s: float


def measure_head_of_line(
    testbed: Testbed, workload: Workload, lists: BlockPattern = BlockPattern.FRAGMENTED
) -> HeadOfLine:
    """Measure pulls of 64 KiB, alone and behind a large one, in turn."""
    sized = BenchDeployment(name="sized", shape=SHAPE, layers=LAYERS, pool_blocks=1)
    small_blocks = blocks_for(sized, SMALL_BYTES)
    room = _SMALL_SLOTS * BLOCKS_PER_RUN * small_blocks
    large_blocks = blocks_for(sized, workload.head_of_line_bytes)
    deployment = msgspec.structs.replace(sized, name="behind", pool_blocks=room + large_blocks)
    small = Case(
        deployment=deployment, lists=BlockPattern.CONTIGUOUS, blocks=small_blocks, slots=_SMALL_SLOTS
    )
    large = Case(deployment=deployment, lists=lists, blocks=large_blocks, first_block=room)
    alone: list[float] = []
    hindered: list[float] = []
    with testbed.pair(deployment, baselines=False) as pair:
        ours = KvxferdPulls(pair)
        ours.move(large, 1, 1)  # every page is mapped
        verify_all_bytes(pair, small, [ours], 1)
        for nonce in range(_FIRST_NONCE, _FIRST_NONCE + workload.rounds):
            pair.source.call(BenchRank.stamp, small, nonce)
            samples = ours.move(small, workload.small_per_round, 1)
            slots = min(workload.small_per_round, _SMALL_SLOTS)
            pair.require_correct(small, nonce, slots)
            alone += [sample.ended - sample.began for sample in samples]
            pair.source.call(BenchRank.stamp, large, nonce)
            _, *rest = _pull_behind_large(pair, large, small, workload.head_of_line_pulls)
            pair.require_correct(large, nonce, 1)
            # Stamping the large case restored the small ones' content: they must have moved that.
            slots = min(len(rest), _SMALL_SLOTS)
            pair.require_correct(small, UNSTAMPED, slots, is_whole=True)
            hindered += [sample.ended - sample.began for sample in rest]
    return HeadOfLine(
        large_bytes=workload.head_of_line_bytes,
        rounds=workload.rounds,
        num_alone=len(alone),
        num_behind=len(hindered),
        alone_p99_s=percentile(alone, 99),
        behind_p99_s=percentile(hindered, 99),
    )


def _pull_behind_large(pair: RunningEngines, large: Case, small: Case, count: int) -> list[Sample]:
    large_batch = pair.publish_prepared(large, 1)
    small_batch = pair.publish_prepared(small, count)
    (large_ref,) = large_batch.refs
    samples = pair.sink.call(BenchRank.pull_behind, large, large_ref, small, small_batch.refs)
    num_small = len(samples) - 1
    pair.sink.call(BenchRank.abandon_all, small_batch.refs[num_small:])
    pair.release(large_batch)
    pair.release(small_batch)
    return samples
