"""The engine's own thread: time inside pull(), and what posting the same request there takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvxferd.bench.cases import BlockPattern, Case
from kvxferd.bench.implementations import (
    ENGINE,
    KVXFERD,
    RAW,
    EngineNixl,
    Implementation,
    KvxferdPulls,
    RawNixl,
)
from kvxferd.bench.points import median, percentile
from kvxferd.bench.protocol import Sample
from kvxferd.bench.rounds import Rounds, interleave, verify_all_bytes
from kvxferd.bench.shapes import IDS_SHAPE, Deployment
from kvxferd.bench.testbed import Testbed
from kvxferd.bench.workload import Workload

MANY_IDS = 65_536  # a million tokens at 16 tokens a block
MOST_IDS = 1 << 20


class CallIds(NamedTuple):
    """The block ids of a call: an int32 buffer, which the client copies unless it borrows it."""

    num: int
    borrowed: bool


COPIED = tuple(CallIds(count, borrowed=False) for count in (1, 1024, MANY_IDS))
BORROWED = tuple(CallIds(count, borrowed=True) for count in (MANY_IDS, MOST_IDS))
# A list of a million ids takes the daemon some time, and few calls are enough.
_LARGEST_DIVISOR = 10


@dataclass(frozen=True)
class Calls:
    """The results in seconds, by the ids of the call."""

    rounds: int
    n: dict[CallIds, int]
    pull_p50_s: dict[CallIds, float]
    pull_p99_s: dict[CallIds, float]
    posting_median_s: float  # of as many scattered blocks in the engine: indices, request, post
    pull_median_s: float  # of the same requests
    num_posted: int


async def measure_calls(testbed: Testbed, workload: Workload) -> Calls:
    """Measure calls of up to a million ids, and a few scattered requests of 65,536."""
    deployment = Deployment(name="ids", shape=IDS_SHAPE, layers=1, pool_blocks=MOST_IDS)
    times: dict[CallIds, list[float]] = {ids: [] for ids in (*COPIED, *BORROWED)}
    async with testbed.pair(deployment) as pair:
        cases = {
            ids: Case(deployment=deployment, lists=BlockPattern.CONTIGUOUS, blocks=ids.num) for ids in times
        }
        for ids, case in cases.items():
            await verify_all_bytes(
                pair, case, [KvxferdPulls(pair, is_prepared=False, is_borrowed=ids.borrowed)], 1
            )
        for number in range(workload.rounds + 1):
            for ids, case in cases.items():
                ours = KvxferdPulls(pair, is_prepared=False, is_borrowed=ids.borrowed)
                fewer = _LARGEST_DIVISOR if ids.num == MOST_IDS else 1
                samples = await ours.move(case, max(1, workload.calls_per_round // fewer), 1)
                if number > 0:  # the first round is a warm-up
                    times[ids] += map(_call_time, samples)
        scattered = Case(deployment=deployment, lists=BlockPattern.SCATTERED, blocks=MANY_IDS)
        implementations: list[Implementation] = [KvxferdPulls(pair), RawNixl(pair), EngineNixl(pair)]
        found = await interleave(pair, scattered, implementations, workload.rounds, 1)
    return Calls(
        rounds=workload.rounds,
        n={ids: len(values) for ids, values in times.items()},
        pull_p50_s={ids: percentile(values, 50) for ids, values in times.items()},
        pull_p99_s={ids: percentile(values, 99) for ids, values in times.items()},
        posting_median_s=median(_call_times(found, ENGINE)),
        pull_median_s=median(_call_times(found, KVXFERD)),
        num_posted=len(found.by_implementation[RAW]),
    )


def _call_time(sample: Sample) -> float:
    return sample.posted - sample.began


def _call_times(found: Rounds, name: str) -> list[float]:
    return [_call_time(sample) for one in found.by_implementation[name] for sample in one.samples]
