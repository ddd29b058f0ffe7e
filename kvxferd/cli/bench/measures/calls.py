"""The engine's own thread: time inside pull(), and what posting the same request there takes."""

from __future__ import annotations

from dataclasses import dataclass

from kvxferd.cli.bench.cases import BLOCKS_IN_A_RUN, Case, Lists
from kvxferd.cli.bench.contenders import ENGINE, KVXFERD, RAW, Contender, Engine, Kvxferd, Raw
from kvxferd.cli.bench.effort import Effort
from kvxferd.cli.bench.points import median, percentile
from kvxferd.cli.bench.rounds import Rounds, interleave
from kvxferd.cli.bench.shapes import IDS, Deployment
from kvxferd.cli.bench.speech import Sample
from kvxferd.cli.bench.stage import Stage

NUM_IDS = (1, 1024, 65536)
MOST_IDS = NUM_IDS[-1]


@dataclass(frozen=True)
class Calls:
    """What was seen. Seconds; `n` calls of each number of ids."""

    n: int
    rounds: int
    pull_p50_s: dict[int, float]
    pull_p99_s: dict[int, float]
    posting_median_s: float  # of as many scattered blocks in the engine: indices, request, post
    pull_median_s: float  # of the same requests
    num_posted: int


async def calls(stage: Stage, effort: Effort) -> Calls:
    """Measure calls with int32 buffers of up to 65,536 ids, and a few scattered requests of as many."""
    deployment = Deployment(name="ids", shape=IDS, layers=1, pool_blocks=MOST_IDS + BLOCKS_IN_A_RUN)
    times: dict[int, list[float]] = {num_ids: [] for num_ids in NUM_IDS}
    async with stage.pair(deployment) as pair:
        cases = {n: Case(deployment=deployment, lists=Lists.CONTIGUOUS, blocks=n) for n in NUM_IDS}
        ours = Kvxferd(pair, is_prepared=False)
        for case in cases.values():
            await ours.move(case, 2, 1)
        for _ in range(effort.rounds):
            for num_ids, case in cases.items():
                times[num_ids] += map(_on_thread, await ours.move(case, effort.calls_per_round, 1))
        scattered = Case(deployment=deployment, lists=Lists.SCATTERED, blocks=MOST_IDS)
        contenders: list[Contender] = [Kvxferd(pair), Raw(pair), Engine(pair)]
        found = await interleave(pair, scattered, contenders, effort.rounds, 1)
    return Calls(
        n=len(times[MOST_IDS]),
        rounds=effort.rounds,
        pull_p50_s={n: percentile(values, 50) for n, values in times.items()},
        pull_p99_s={n: percentile(values, 99) for n, values in times.items()},
        posting_median_s=median(_threads(found, ENGINE)),
        pull_median_s=median(_threads(found, KVXFERD)),
        num_posted=len(found.by_contender[RAW]),
    )


def _on_thread(sample: Sample) -> float:
    return sample.posted - sample.began


def _threads(found: Rounds, name: str) -> list[float]:
    return [_on_thread(sample) for one in found.by_contender[name] for sample in one.samples]
