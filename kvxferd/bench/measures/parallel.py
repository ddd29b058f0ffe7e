"""Eight ranks: the speed of 64 pulls in flight against one at a time, and its fairness."""

from __future__ import annotations

import time
from dataclasses import dataclass

import msgspec

from kvxferd.bench import protocol
from kvxferd.bench.cases import BlockPattern, Case, blocks_for, ids_per_pull
from kvxferd.bench.points import median
from kvxferd.bench.protocol import Sample
from kvxferd.bench.shapes import Deployment, layers_for
from kvxferd.bench.testbed import EnginePair, PublishedBatch
from kvxferd.bench.workload import MIB, Workload
from kvxferd.ids import Rank
from kvxferd.tooling.async_tasks import gather_or_cancel

SHAPE = "llama-3-70b"
NUM_RANKS = 8
WINDOW = 8
SIZE_BYTES = 4 * MIB
# Blocks for this many pulls, which is more than are in flight at a time.
SLOTS = 2 * WINDOW
# By the end of this time every rank has its command.
_START_S = 0.1


@dataclass(frozen=True)
class Parallel:
    """The results."""

    size_bytes: int
    rounds: int
    pulls_per_round: int
    speedup: float  # total throughput with 64 in flight by that of one at a time: median of the rounds
    together_gb_per_s: float
    one_gb_per_s: float
    spread: float  # of the ranks' own rates: (highest - lowest) / median, the median of the rounds
    widest_spread: float


def parallel_deployment(workload: Workload) -> Deployment:
    """Return engines of eight ranks with room for a round."""
    sized = Deployment(name="sized", shape=SHAPE, layers=layers_for(SHAPE, SIZE_BYTES), pool_blocks=1)
    taken = ids_per_pull(sized, blocks_for(sized, SIZE_BYTES))
    return Deployment(
        name="eight",
        shape=SHAPE,
        layers=sized.layers,
        ranks=NUM_RANKS,
        pool_blocks=2 * SLOTS * taken,
    )


async def measure_parallel(pair: EnginePair, workload: Workload) -> Parallel:
    """Measure a pair of `parallel_deployment`."""
    blocks = blocks_for(msgspec.structs.replace(pair.deployment, ranks=1), SIZE_BYTES)
    case = Case(deployment=pair.deployment, lists=BlockPattern.FRAGMENTED, blocks=blocks, slots=SLOTS)
    count = workload.parallel_pulls
    speedups, wholes, ones, spreads = [], [], [], []
    await _verify_all_ranks(pair, case)
    for number in range(workload.rounds):
        if number % 2 == 0:
            whole, one = await _all_at_once(pair, case, count), await _one_at_a_time(pair, case, count)
        else:  # so that neither always runs with the caches that the other left warm
            one, whole = await _one_at_a_time(pair, case, count), await _all_at_once(pair, case, count)
        wholes.append(_rate_of_all(whole))
        ones.append(_rate_of_each(one))
        speedups.append(wholes[-1] / ones[-1])
        spreads.append(rate_spread(whole))
    return Parallel(
        size_bytes=SIZE_BYTES,
        rounds=workload.rounds,
        pulls_per_round=workload.parallel_pulls * NUM_RANKS,
        speedup=median(speedups),
        together_gb_per_s=median(wholes) / 1e9,
        one_gb_per_s=median(ones) / 1e9,
        spread=median(spreads),
        widest_spread=max(spreads),
    )


def rate_spread(by_rank: dict[Rank, list[Sample]]) -> float:
    """Return how far the ranks' rates lie apart; each moved the same bytes from the same start time."""
    began = min(sample.began for samples in by_rank.values() for sample in samples)
    rates = [
        sum(sample.bytes for sample in samples) / (max(sample.ended for sample in samples) - began)
        for samples in by_rank.values()
    ]
    return (max(rates) - min(rates)) / median(rates)


def _rate_of_all(by_rank: dict[Rank, list[Sample]]) -> float:
    samples = [sample for some in by_rank.values() for sample in some]
    seconds = max(sample.ended for sample in samples) - min(sample.began for sample in samples)
    return sum(sample.bytes for sample in samples) / seconds


def _rate_of_each(by_rank: dict[Rank, list[Sample]]) -> float:
    samples = [sample for some in by_rank.values() for sample in some]
    return sum(sample.bytes for sample in samples) / sum(sample.ended - sample.began for sample in samples)


async def _all_at_once(pair: EnginePair, case: Case, count: int) -> dict[Rank, list[Sample]]:
    """Have every rank pull all, `WINDOW` at a time, from one start time."""
    batch = await pair.publish_prepared(case, count)
    at = time.perf_counter() + _START_S
    answers = await gather_or_cancel(*(_pull(pair, rank, case, batch, WINDOW, at) for rank in pair.ranks))
    await pair.release(batch)
    return dict(zip(pair.ranks, answers, strict=True))


async def _one_at_a_time(pair: EnginePair, case: Case, count: int) -> dict[Rank, list[Sample]]:
    """Have one rank after the other pull all, one at a time."""
    batch = await pair.publish_prepared(case, count)
    answers = {rank: await _pull(pair, rank, case, batch, 1, 0.0) for rank in pair.ranks}
    await pair.release(batch)
    return answers


async def _pull(
    pair: EnginePair, rank: Rank, case: Case, batch: PublishedBatch, window: int, at: float
) -> list[Sample]:
    command = protocol.PullCommand(case=case, refs=batch.refs, window=window, at=at)
    return (await pair.workers["sink", rank].request(command, protocol.Moved)).samples


async def _verify_all_ranks(pair: EnginePair, case: Case) -> None:
    """Warm up, and compare every byte of every rank."""
    await pair.request_all("source", protocol.Stamp(case=case, nonce=1))
    await pair.request_all("sink", protocol.Wipe(case=case))
    await _all_at_once(pair, case, case.slots)
    await pair.require_correct(protocol.Check(case=case, nonce=1, slots=case.slots, whole=True))
