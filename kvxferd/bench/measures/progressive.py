"""Transfers that are read while they are written, beside pulls of the same bytes after the end, in turn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec

from kvxferd.bench.cases import BLOCKS_PER_RUN, BlockPattern, Case, blocks_for
from kvxferd.bench.implementations import KVXFERD, Implementation, KvxferdPulls
from kvxferd.bench.points import median
from kvxferd.bench.rank_process import BenchRank
from kvxferd.bench.rounds import interleave
from kvxferd.bench.samples import Sample
from kvxferd.bench.shapes import BenchDeployment, footprint, layers_for
from kvxferd.bench.testbed import RunningEngines
from kvxferd.bench.workload import ProgressiveSize, Workload

SHAPE = "llama-3-70b"
PROGRESSIVE = "progressive"
_NUM_LATEST = 5  # plain pulls, by whose median the time between two chunks is chosen

_names = itertools.count()


class ProgressivePoint(msgspec.Struct, frozen=True, kw_only=True):
    """One number of chunks. Times are medians of the rounds, in seconds."""

    transport: str
    num_chunks: int
    chunk_bytes: int
    bytes: int  # of the whole transfer
    rounds: int
    pace: float
    gap_s: float  # between two chunks: `pace` times as long as the plain pull takes for one
    plain_s: float  # pull() of the transfer that is whole, prepared, to Delivered
    handover_s: float  # `ready` for the last chunk to Delivered
    ratio: float  # median of the rounds: the handover divided by the plain pull of the same round


class WholePulls:
    """Pulls of transfers that are whole."""

    name = KVXFERD

    def __init__(self, pair: RunningEngines) -> None:
        self._pulls = KvxferdPulls(pair)
        self.seconds: list[float] = []

    def move(self, case: Case, count: int, window: int) -> list[Sample]:
        """Publish, prepare, pull."""
        samples = self._pulls.move(case, count, window)
        self.seconds += [sample.ended - sample.began for sample in samples]
        return samples


class ProgressivePulls:
    """Pulls of transfers whose chunks are reported meanwhile. A sample begins with the last report."""

    name = PROGRESSIVE

    def __init__(self, pair: RunningEngines, size: ProgressiveSize, beside: WholePulls) -> None:
        self._pair = pair
        self._size = size
        self._beside = beside

    @property
    def gap_s(self) -> float:
        """The time between two chunks, by what the latest plain pulls took."""
        return self._size.pace * median(self._beside.seconds[-_NUM_LATEST:]) / self._size.num_chunks

    def move(self, case: Case, count: int, window: int) -> list[Sample]:
        """Open one transfer after the other, pull it, and report its chunks."""
        return [self._move_one(case) for _ in range(count)]

    def _move_one(self, case: Case) -> Sample:
        pair, name = self._pair, _new_name()
        ref = pair.source.call(BenchRank.publish_unwritten, case, name)
        pulled = pair.sink.start(BenchRank.pull_all, case, [ref], progressive=True)
        # It fails at once or ends soon; the pull without its chunks only at its deadline.
        last = pair.source.call(BenchRank.extend, case, name, self._size.num_chunks, self.gap_s)
        (sample,) = pulled.result()
        pair.source.call(BenchRank.await_release, [name])
        # Delivered has the bytes of the last piece. That all are there is checked by their content.
        return Sample(last, last, last, sample.ended, num_bytes(case), sample.runs)


def measure_progressive(
    pair: RunningEngines, transport: str, workload: Workload
) -> Iterator[ProgressivePoint]:
    """Yield a point for each size. `pair`: of `deployment_of`."""
    for size in workload.progressive:
        yield _measure_point(pair, transport, size)


def deployment_of(transport: str, workload: Workload) -> BenchDeployment:
    """Return engines with room for one transfer of each size in turn."""
    largest = max(size.chunk_bytes for size in workload.progressive)
    alone = BenchDeployment(name="alone", shape=SHAPE, layers=layers_for(SHAPE, largest), pool_blocks=1)
    blocks = [size.num_chunks * _chunk_blocks(alone, size) for size in workload.progressive]
    return msgspec.structs.replace(
        alone,
        name=f"progressive-{transport}",
        pool_blocks=max(blocks),
    )


def case_of(deployment: BenchDeployment, size: ProgressiveSize) -> Case:
    """Return one transfer of that size."""
    blocks = size.num_chunks * _chunk_blocks(deployment, size)
    return Case(deployment=deployment, lists=BlockPattern.FRAGMENTED, blocks=blocks)


def num_bytes(case: Case) -> int:
    """Return the bytes of one transfer."""
    return case.blocks * footprint(case.deployment.layout()).block_bytes


def _chunk_blocks(deployment: BenchDeployment, size: ProgressiveSize) -> int:
    """Return how many blocks come closest to a chunk, in whole runs."""
    return max(1, round(blocks_for(deployment, size.chunk_bytes) / BLOCKS_PER_RUN)) * BLOCKS_PER_RUN


def _measure_point(pair: RunningEngines, transport: str, size: ProgressiveSize) -> ProgressivePoint:
    case = case_of(pair.deployment, size)
    whole = WholePulls(pair)
    whole.move(case, 1, 1)  # connects, and maps every page
    growing = ProgressivePulls(pair, size, whole)
    implementations: list[Implementation] = [whole, growing]
    found = interleave(pair, case, implementations, size.rounds, 1)
    plain_s = [one.seconds for one in found.by_implementation[KVXFERD]]
    handover_s = [one.seconds for one in found.by_implementation[PROGRESSIVE]]
    return ProgressivePoint(
        transport=transport,
        num_chunks=size.num_chunks,
        chunk_bytes=size.chunk_bytes,
        bytes=num_bytes(case),
        rounds=size.rounds,
        pace=size.pace,
        gap_s=size.pace * median(plain_s) / size.num_chunks,
        plain_s=median(plain_s),
        handover_s=median(handover_s),
        ratio=median([ours / theirs for ours, theirs in zip(handover_s, plain_s, strict=True)]),
    )


def _new_name() -> str:
    return f"progressive-{next(_names)}"
