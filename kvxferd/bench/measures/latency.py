"""Small prepared pulls: the time that a daemon adds to raw NIXL, and where a pull's time goes."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvxferd.bench import protocol
from kvxferd.bench.cases import BlockPattern, Case, blocks_for, ids_per_pull
from kvxferd.bench.implementations import KVXFERD, RAW, EngineNixl, Implementation, KvxferdPulls, RawNixl
from kvxferd.bench.points import Point, median, percentile, point_of
from kvxferd.bench.rounds import Rounds, interleave
from kvxferd.bench.shapes import Deployment, layers_for
from kvxferd.bench.testbed import EnginePair, Testbed
from kvxferd.bench.workload import SMALL_BYTES, Workload
from kvxferd.core.snapshot import PullRecord
from kvxferd.telemetry.history import record_from_json

SHAPE = "llama-3-70b"
# A mover spins for a while after a read. After this long it sleeps, as between an
# engine's requests.
PULL_GAP_S = 0.005


@dataclass(frozen=True)
class Latency:
    """The results in seconds."""

    point: Point
    added_p50_s: float  # pull() to Delivered, less the median of raw NIXL in the same round
    added_p99_s: float
    phases_s: dict[str, float]  # medians, of prepared pulls, as the daemon measures them
    unprepared_phases_s: dict[str, float]
    spaced_added_s: list[float]  # of pulls `PULL_GAP_S` apart, less raw NIXL's median back to back


async def measure_latency(testbed: Testbed, transport: str, workload: Workload) -> Latency:
    """Measure pulls of 64 KiB, one after the other."""
    layers = layers_for(SHAPE, SMALL_BYTES)
    sized = Deployment(name="sized", shape=SHAPE, layers=layers, pool_blocks=1)
    blocks = blocks_for(sized, SMALL_BYTES)
    slots = 4
    pool = 2 * slots * ids_per_pull(sized, blocks)
    deployment = msgspec.structs.replace(sized, name=f"{transport}-small", pool_blocks=pool)
    async with testbed.pair(deployment) as pair:
        case = Case(deployment=deployment, lists=BlockPattern.FRAGMENTED, blocks=blocks, slots=slots)
        implementations: list[Implementation] = [KvxferdPulls(pair), RawNixl(pair), EngineNixl(pair)]
        found = await interleave(pair, case, implementations, workload.rounds, workload.small_per_round)
        prepared = await _phases(pair, workload.small_per_round)
        await KvxferdPulls(pair, is_prepared=False).move(case, workload.small_per_round, 1)
        unprepared_phases = await _phases(pair, workload.small_per_round)
        point = point_of("latency", transport, SMALL_BYTES, case, found)
        apart: list[protocol.Sample] = []
        for _ in range(workload.rounds):
            apart += await KvxferdPulls(pair, gap_s=PULL_GAP_S).move(case, workload.small_per_round, 1)
        return Latency(
            point=point,
            added_p50_s=percentile(added_latency(found), 50),
            added_p99_s=percentile(added_latency(found), 99),
            phases_s=prepared,
            unprepared_phases_s=unprepared_phases,
            spaced_added_s=[one.ended - one.began - point.contenders[RAW].median_s for one in apart],
        )


def added_latency(found: Rounds) -> list[float]:
    """Return, for each pull, its time less the median that raw NIXL took in the same round."""
    result = []
    for ours, theirs in zip(found.by_implementation[KVXFERD], found.by_implementation[RAW], strict=True):
        typical = median([sample.ended - sample.built for sample in theirs.samples])
        result += [sample.ended - sample.began - typical for sample in ours.samples]
    return result


async def _phases(pair: EnginePair, count: int) -> dict[str, float]:
    """Return the medians of the phases of the last pulls, from the sink's daemon, and "total"."""
    answer = await pair.testbed.daemons["sink"].get("/v1/history")
    records = [record_from_json(one) for one in answer["records"] if one["kind"] == "pull"][-count:]
    pulls = [record for record in records if isinstance(record, PullRecord)]
    names = {name for pull in pulls for name in pull.phases_s}
    found = {name: median([pull.phases_s.get(name, 0.0) for pull in pulls]) for name in sorted(names)}
    return found | {"total": median([pull.total_s for pull in pulls])}
