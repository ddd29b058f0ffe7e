"""The engine's own thread: time inside pull()."""

from __future__ import annotations

from dataclasses import dataclass

from kvxferd.bench.cases import BlockPattern, Case
from kvxferd.bench.implementations import KvxferdPulls
from kvxferd.bench.points import percentile
from kvxferd.bench.rounds import verify_all_bytes
from kvxferd.bench.shapes import IDS_SHAPE, BenchDeployment
from kvxferd.bench.testbed import Testbed
from kvxferd.bench.workload import Workload

# Block ids of a call. The most are a million tokens at 16 tokens a block.
NUM_IDS = (1, 1024, 65_536)


@dataclass(frozen=True)
class Calls:
    """The results in seconds, by the block ids of the call."""

    rounds: int
    n: int  # calls of each
    p99_s: dict[int, float]


def measure_calls(testbed: Testbed, workload: Workload) -> Calls:
    """Measure calls whose ids are an int32 buffer, which the client copies."""
    deployment = BenchDeployment(name="ids", shape=IDS_SHAPE, layers=1, pool_blocks=max(NUM_IDS))
    times: dict[int, list[float]] = {num: [] for num in NUM_IDS}
    with testbed.pair(deployment) as pair:
        ours = KvxferdPulls(pair, is_prepared=False)
        cases = {
            num: Case(deployment=deployment, lists=BlockPattern.CONTIGUOUS, blocks=num) for num in NUM_IDS
        }
        for case in cases.values():
            verify_all_bytes(pair, case, [ours], 1)
        for number in range(workload.rounds + 1):
            for num, case in cases.items():
                samples = ours.move(case, workload.calls_per_round, 1)
                if number > 0:  # the first round is a warm-up
                    times[num] += [sample.posted - sample.began for sample in samples]
    return Calls(
        rounds=workload.rounds,
        n=workload.rounds * workload.calls_per_round,
        p99_s={num: percentile(values, 99) for num, values in times.items()},
    )
