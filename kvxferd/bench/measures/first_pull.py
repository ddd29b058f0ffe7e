"""The first pull between engines whose daemons have never connected, each time with new daemons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from kvxferd.bench.cases import BlockPattern, Case, blocks_for
from kvxferd.bench.points import median
from kvxferd.bench.processes import BenchProcesses
from kvxferd.bench.rank_process import BenchRank
from kvxferd.bench.shapes import BenchDeployment, layers_for
from kvxferd.bench.testbed import PublishedBatch, RunningEngines, Testbed
from kvxferd.bench.workload import FIRST_BYTES, Workload

SHAPE = "llama-3-70b"


@dataclass
class FirstPull:
    """The results in seconds, round by round."""

    size_bytes: int
    layout: str = "HND"
    first_s: list[float] = field(default_factory=list)  # pull() to Delivered

    @property
    def median_s(self) -> float:
        """The median of the first pulls."""
        return median(self.first_s)


def measure_first_pull(
    processes: BenchProcesses, environment: Mapping[str, str], workload: Workload
) -> list[FirstPull]:
    """Measure first pulls of 64 MiB in each of the workload's layouts, in turn."""
    found = [FirstPull(FIRST_BYTES, layout) for layout in workload.layouts]
    for nonce in range(1, workload.first_rounds + 1):
        for one in found:
            with (
                Testbed.open(processes, environment, baselines=False) as testbed,
                testbed.pair(_deployment(f"first-{nonce}", one.layout), baselines=False) as pair,
            ):
                pair.source.call(BenchRank.stamp, _case(pair), nonce)
                one.first_s.append(_pull_and_verify(pair, pair.publish(_case(pair), 1), nonce))
    return found


def _pull_and_verify(pair: RunningEngines, batch: PublishedBatch, nonce: int) -> float:
    """Pull, compare every byte, and return how long the pull took."""
    (sample,) = pair.sink.call(BenchRank.pull_all, _case(pair), batch.refs)
    pair.release(batch)
    pair.require_correct(_case(pair), nonce, 1, is_whole=True)
    return sample.ended - sample.began


def _deployment(name: str, layout: str) -> BenchDeployment:
    layers = layers_for(SHAPE, FIRST_BYTES)
    sized = BenchDeployment(name=name, shape=SHAPE, layers=layers, pool_blocks=1, layout_name=layout)
    return msgspec.structs.replace(sized, pool_blocks=2 * blocks_for(sized, FIRST_BYTES))


def _case(pair: RunningEngines) -> Case:
    blocks = blocks_for(pair.deployment, FIRST_BYTES)
    return Case(deployment=pair.deployment, lists=BlockPattern.CONTIGUOUS, blocks=blocks)
