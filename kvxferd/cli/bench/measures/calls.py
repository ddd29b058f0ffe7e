"""The engine's own thread: time inside pull(), and what posting the same request there takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvxferd.cli.bench.cases import Case, Lists
from kvxferd.cli.bench.contenders import ENGINE, KVXFERD, RAW, Contender, Engine, Kvxferd, Raw
from kvxferd.cli.bench.effort import Effort
from kvxferd.cli.bench.points import median, percentile
from kvxferd.cli.bench.rounds import Rounds, interleave, prove
from kvxferd.cli.bench.shapes import IDS, Deployment
from kvxferd.cli.bench.speech import Sample
from kvxferd.cli.bench.stage import Stage

MANY_IDS = 65_536  # a million tokens at 16 tokens a block
MOST_IDS = 1 << 20


class Ids(NamedTuple):
    """The block ids of a call: an int32 buffer, which the client copies unless it is lent."""

    num: int
    lent: bool


COPIED = tuple(Ids(count, lent=False) for count in (1, 1024, MANY_IDS))
LENT = tuple(Ids(count, lent=True) for count in (MANY_IDS, MOST_IDS))
# A list of a million takes the daemon some time; there is not that much to see.
_FEWER = 10


@dataclass(frozen=True)
class Calls:
    """What was seen, by the ids of the call. Seconds."""

    rounds: int
    n: dict[Ids, int]
    pull_p50_s: dict[Ids, float]
    pull_p99_s: dict[Ids, float]
    posting_median_s: float  # of as many scattered blocks in the engine: indices, request, post
    pull_median_s: float  # of the same requests
    num_posted: int


async def calls(stage: Stage, effort: Effort) -> Calls:
    """Measure calls of up to a million ids, and a few scattered requests of 65,536."""
    deployment = Deployment(name="ids", shape=IDS, layers=1, pool_blocks=MOST_IDS)
    times: dict[Ids, list[float]] = {ids: [] for ids in (*COPIED, *LENT)}
    async with stage.pair(deployment) as pair:
        cases = {ids: Case(deployment=deployment, lists=Lists.CONTIGUOUS, blocks=ids.num) for ids in times}
        for ids, case in cases.items():
            await prove(pair, case, [Kvxferd(pair, is_prepared=False, lends=ids.lent)], 1)
        for number in range(effort.rounds + 1):
            for ids, case in cases.items():
                ours = Kvxferd(pair, is_prepared=False, lends=ids.lent)
                fewer = _FEWER if ids.num == MOST_IDS else 1
                samples = await ours.move(case, max(1, effort.calls_per_round // fewer), 1)
                if number > 0:  # the first round is to get warm
                    times[ids] += map(_on_thread, samples)
        scattered = Case(deployment=deployment, lists=Lists.SCATTERED, blocks=MANY_IDS)
        contenders: list[Contender] = [Kvxferd(pair), Raw(pair), Engine(pair)]
        found = await interleave(pair, scattered, contenders, effort.rounds, 1)
    return Calls(
        rounds=effort.rounds,
        n={ids: len(values) for ids, values in times.items()},
        pull_p50_s={ids: percentile(values, 50) for ids, values in times.items()},
        pull_p99_s={ids: percentile(values, 99) for ids, values in times.items()},
        posting_median_s=median(_threads(found, ENGINE)),
        pull_median_s=median(_threads(found, KVXFERD)),
        num_posted=len(found.by_contender[RAW]),
    )


def _on_thread(sample: Sample) -> float:
    return sample.posted - sample.began


def _threads(found: Rounds, name: str) -> list[float]:
    return [_on_thread(sample) for one in found.by_contender[name] for sample in one.samples]
