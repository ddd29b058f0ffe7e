"""Transfers that are read while they are written, beside pulls of the same bytes after the end, in turn."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvxferd.bench.cases import (
    BLOCKS_PER_RUN,
    BlockPattern,
    Case,
    blocks_for,
    equal_engines,
    footprint,
    layers_for,
    with_pool,
)
from kvxferd.bench.contenders import KVXFERD, Contender, KvxferdPulls, interleave
from kvxferd.bench.figures import Figure, Finding, Point, at_most, median, point_of
from kvxferd.bench.rank import BenchRank, Sample
from kvxferd.bench.testbed import RunningEngines, Site, Testbed
from kvxferd.bench.workload import HandoverSize, Workload
from kvxferd.tooling.engine_pair import EnginePair
from kvxferd.tooling.output import format_bytes, format_count

SHAPE = "llama-3-70b"
PROGRESSIVE = "progressive"

_names = itertools.count()


def measure_handover(site: Site, workload: Workload) -> Iterator[Finding]:
    """Yield a point for each size, and the ratios of those whose pace is that of reading."""
    pair = pair_of(workload)
    with Testbed.open(site) as testbed, testbed.engines(pair) as engines:
        for size in workload.handover_sizes:
            point = _measure_point(engines, site.transport, size, workload.rounds)
            yield point
            if size.pace == 1:
                yield ratio_of(point, size)


def ratio_of(point: Point, size: HandoverSize) -> Figure:
    """Return how much is waited for after the end, by the time of a pull after it."""
    how = (
        f"{point.case['chunks']} over {point.transport}, fragmented lists, reported as far apart as the pull "
        "takes for one; ready() for the last to Delivered, by pull() to Delivered of a whole transfer, "
        f"prepared; median of {point.rounds} rounds, in turn"
    )
    name, aim = ("handover_ratio_one_chunk", 1.05) if size.num_chunks == 1 else ("handover_ratio", 0.25)
    title = f"handover by a pull after the end, {point.case['chunks']}"
    return at_most(name, title, point.ratios[PROGRESSIVE], aim, how)


def pair_of(workload: Workload) -> EnginePair:
    """Return engines with room for one transfer of each size in turn."""
    largest = max(size.chunk_bytes for size in workload.handover_sizes)
    sized = equal_engines("sized", SHAPE, layers_for(SHAPE, largest))
    return with_pool(sized, "handover", max(num_blocks(sized, size) for size in workload.handover_sizes))


def num_blocks(pair: EnginePair, size: HandoverSize) -> int:
    """Return the blocks of one transfer of about that size, in whole runs of each chunk."""
    runs = max(1, round(blocks_for(pair, size.chunk_bytes) / BLOCKS_PER_RUN))
    return size.num_chunks * runs * BLOCKS_PER_RUN


@dataclass
class PlainPulls(KvxferdPulls):
    """Pulls of whole transfers, by whose times the others' chunks are reported."""

    latest_s: deque[float] = field(default_factory=lambda: deque(maxlen=5))

    def move(self, count: int, window: int) -> list[Sample]:
        """Publish, prepare, pull."""
        samples = super().move(count, window)
        self.latest_s.extend(sample.seconds for sample in samples)
        return samples


@dataclass
class ProgressivePulls(Contender):
    """Pulls of transfers whose chunks are reported meanwhile. A sample begins with the last report."""

    size: HandoverSize
    beside: PlainPulls

    def move(self, count: int, window: int) -> list[Sample]:
        """Open one transfer after the other, pull it, and report its chunks."""
        return [self._move_one() for _ in range(count)]

    def _move_one(self) -> Sample:
        engines, case, num_chunks = self.engines, self.case, self.size.num_chunks
        name = f"{PROGRESSIVE}-{next(_names)}"
        batch = engines.source.call(BenchRank.publish_unwritten, case, name)
        pulled = engines.sink.start(BenchRank.pull_all, batch, progressive=True)
        # It fails at once or ends soon; the pull without its chunks only at its deadline.
        gap_s = self.size.pace * median(list(self.beside.latest_s)) / num_chunks
        last = engines.source.call(BenchRank.extend, case, name, num_chunks, gap_s)
        (sample,) = pulled.result()
        engines.release(batch)
        # Delivered has the bytes of the last piece. That all are there is checked by their content.
        num_bytes = case.blocks * footprint(case.pair).block_bytes
        return Sample(last, last, last, sample.ended, num_bytes, sample.runs)


def _measure_point(engines: RunningEngines, transport: str, size: HandoverSize, rounds: int) -> Point:
    case = Case(engines.pair, BlockPattern.FRAGMENTED, num_blocks(engines.pair, size))
    plain = PlainPulls(engines, case)
    plain.move(1, 1)  # connects, and maps every page
    found = interleave([plain, ProgressivePulls(engines, case, PROGRESSIVE, size, plain)], rounds, 1)
    words = {
        "chunks": f"{format_count(size.num_chunks, 'chunk')} of {format_bytes(size.chunk_bytes)}",
        "pace": f"{size.pace:g}",
    }
    plain_s = median([one.seconds for one in found[KVXFERD]])
    facts = {
        "between_two_s": size.pace * plain_s / size.num_chunks,
        "pull_after_the_end_s": plain_s,
        "handover_s": median([one.seconds for one in found[PROGRESSIVE]]),
    }
    num_bytes = size.num_chunks * size.chunk_bytes
    return point_of("handover", transport, words, num_bytes, found, facts)
