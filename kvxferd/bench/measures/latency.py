"""Small prepared pulls: the time that a daemon adds to raw NIXL."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvxferd.bench.cases import BlockPattern, Case, blocks_for, ids_per_pull
from kvxferd.bench.implementations import KVXFERD, RAW, EngineNixl, Implementation, KvxferdPulls, RawNixl
from kvxferd.bench.points import Point, median, percentile, point_of
from kvxferd.bench.rounds import Rounds, interleave
from kvxferd.bench.shapes import BenchDeployment, layers_for
from kvxferd.bench.testbed import Testbed
from kvxferd.bench.workload import SMALL_BYTES, Workload

SHAPE = "llama-3-70b"


@dataclass(frozen=True)
class Latency:
    """The results in seconds."""

    point: Point
    added_p50_s: float  # pull() to Delivered, less the median of raw NIXL in the same round
    added_p99_s: float


def measure_latency(testbed: Testbed, transport: str, workload: Workload) -> Latency:
    """Measure pulls of 64 KiB, one after the other."""
    layers = layers_for(SHAPE, SMALL_BYTES)
    sized = BenchDeployment(name="sized", shape=SHAPE, layers=layers, pool_blocks=1)
    blocks = blocks_for(sized, SMALL_BYTES)
    slots = 4
    pool = 2 * slots * ids_per_pull(sized, blocks)
    deployment = msgspec.structs.replace(sized, name=f"{transport}-small", pool_blocks=pool)
    with testbed.pair(deployment) as pair:
        case = Case(deployment=deployment, lists=BlockPattern.FRAGMENTED, blocks=blocks, slots=slots)
        implementations: list[Implementation] = [KvxferdPulls(pair), RawNixl(pair), EngineNixl(pair)]
        found = interleave(pair, case, implementations, workload.rounds, workload.small_per_round)
        point = point_of("latency", transport, SMALL_BYTES, case, found)
        return Latency(
            point=point,
            added_p50_s=percentile(added_latency(found), 50),
            added_p99_s=percentile(added_latency(found), 99),
        )


def added_latency(found: Rounds) -> list[float]:
    """Return, for each pull, its time less the median that raw NIXL took in the same round."""
    result = []
    for ours, theirs in zip(found.by_implementation[KVXFERD], found.by_implementation[RAW], strict=True):
        typical = median([sample.ended - sample.built for sample in theirs.samples])
        result += [sample.ended - sample.began - typical for sample in ours.samples]
    return result
