"""Small pulls while a large one runs on the same rank."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvxferd.bench import protocol
from kvxferd.bench.cases import BLOCKS_PER_RUN, BlockPattern, Case, blocks_for
from kvxferd.bench.content import UNSTAMPED
from kvxferd.bench.implementations import KvxferdPulls
from kvxferd.bench.points import percentile
from kvxferd.bench.rounds import verify_all_bytes
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


async def measure_head_of_line(
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
    async with testbed.pair(deployment, baselines=False) as pair:
        ours = KvxferdPulls(pair)
        await ours.move(large, 1, 1)  # every page is mapped
        await verify_all_bytes(pair, small, [ours], 1)
        for nonce in range(_FIRST_NONCE, _FIRST_NONCE + workload.rounds):
            await pair.source.request(protocol.Stamp(case=small, nonce=nonce), protocol.CommandDone)
            samples = await ours.move(small, workload.small_per_round, 1)
            slots = min(workload.small_per_round, _SMALL_SLOTS)
            await pair.require_correct(protocol.Check(case=small, nonce=nonce, slots=slots))
            alone += [sample.ended - sample.began for sample in samples]
            await pair.source.request(protocol.Stamp(case=large, nonce=nonce), protocol.CommandDone)
            _, *rest = await _pull_behind_large(pair, large, small, workload.head_of_line_pulls)
            await pair.require_correct(protocol.Check(case=large, nonce=nonce, slots=1))
            # Stamping the large case restored the small ones' content: they must have moved that.
            slots = min(len(rest), _SMALL_SLOTS)
            await pair.require_correct(protocol.Check(case=small, nonce=UNSTAMPED, slots=slots, whole=True))
            hindered += [sample.ended - sample.began for sample in rest]
    return HeadOfLine(
        large_bytes=workload.head_of_line_bytes,
        rounds=workload.rounds,
        num_alone=len(alone),
        num_behind=len(hindered),
        alone_p99_s=percentile(alone, 99),
        behind_p99_s=percentile(hindered, 99),
    )


async def _pull_behind_large(
    pair: RunningEngines, large: Case, small: Case, count: int
) -> list[protocol.Sample]:
    large_batch = await pair.publish_prepared(large, 1)
    small_batch = await pair.publish_prepared(small, count)
    command = protocol.PullBehind(
        large=large, large_ref=large_batch.refs[0], small=small, small_refs=small_batch.refs
    )
    moved = await pair.sink.request(command, protocol.Moved)
    num_small = len(moved.samples) - 1
    unread = small_batch.refs[num_small:]
    await pair.sink.request(protocol.AbandonCommand(refs=unread), protocol.CommandDone)
    await pair.release(large_batch)
    await pair.release(small_batch)
    return moved.samples
