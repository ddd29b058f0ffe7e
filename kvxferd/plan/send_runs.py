"""From the patterns of a sender's plan and a request's blocks to runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvxferd.ids import GroupName, Rank, RegionId
from kvxferd.layout import PackedBlocks
from kvxferd.plan.expand import MAX_RUNS
from kvxferd.plan.plan import BlockGeometry, GroupRead
from kvxferd.plan.run_shapes import Int64s, OffsetRuns, check_num_runs, distinct, sort_and_merge
from kvxferd.plan.send_pattern import SendPattern
from kvxferd.plan.token_segments import Segments, common_segments

_NO_BLOCKS = PackedBlocks(b"")


class SendRuns(NamedTuple):
    """Byte ranges contiguous on both sides, as offsets in two regions; the destination's ascend."""

    consumer: Rank
    source_region: RegionId
    destination_region: RegionId
    source_offset: Int64s
    destination_offset: Int64s
    length: Int64s


class GeometryPair(NamedTuple):
    """What decides which tokens two block lists have in common."""

    destination: BlockGeometry
    source: BlockGeometry
    granule_tokens: int


_Work = list[tuple[list[SendPattern], Segments]]


def pair_of(pattern: SendPattern) -> GeometryPair:
    """Return both sides of a pattern."""
    return GeometryPair(pattern.destination, pattern.source, pattern.granule_tokens)


def group_read(rank: Rank, destination: BlockGeometry, source: BlockGeometry, granule: int) -> GroupRead:
    """Return the read that answers the sending, as far as checks and segments need it."""
    return GroupRead(rank, destination, source, granule, ())


def pattern_runs(
    patterns: Iterable[SendPattern],
    source: Mapping[GroupName, PackedBlocks],
    destination: Mapping[GroupName, PackedBlocks],
    max_runs: int = MAX_RUNS,
) -> Iterator[SendRuns]:
    """Yield the runs of some patterns like `SenderPlan.runs`, of lists that need no check."""
    segments: dict[GeometryPair, Segments] = {}
    regions: dict[tuple[Rank, RegionId, RegionId], dict[GeometryPair, list[SendPattern]]] = {}
    for pattern in patterns:
        pair = pair_of(pattern)
        if pair not in segments:
            theirs = destination[pair.destination.group]
            mine = source.get(pair.source.group, _NO_BLOCKS)
            segments[pair] = common_segments(group_read(pattern.consumer, *pair), theirs, mine)
        if len(segments[pair].num_items):
            key = (pattern.consumer, pattern.source_strides.region, pattern.destination_strides.region)
            regions.setdefault(key, {}).setdefault(pair, []).append(pattern)
    for (consumer, source_region, destination_region), together in regions.items():
        work = [(alike, segments[pair]) for pair, alike in together.items()]
        for part in _split(work, max_runs):
            columns = [runs for alike, some in part for pattern in alike for runs in _runs(pattern, some)]
            at_destination, at_source, length = sort_and_merge(columns)
            yield SendRuns(consumer, source_region, destination_region, at_source, at_destination, length)


def _split(work: _Work, max_runs: int) -> Iterator[_Work]:
    """Yield the work at once if it has at most `max_runs` runs, else in slices of segments."""
    counts = [_num_runs(alike, segments) for alike, segments in work]
    if sum(counts) <= max_runs:
        yield work
        return
    for (alike, segments), count in zip(work, counts, strict=True):
        total = len(segments.num_items)
        step = max(1, max_runs * total // count)
        for start in range(0, total, step):
            yield [(alike, _slice(segments, start, start + step))]


def _slice(segments: Segments, start: int, stop: int) -> Segments:
    return Segments(
        segments.local_block[start:stop],
        segments.remote_block[start:stop],
        segments.local_item[start:stop],
        segments.remote_item[start:stop],
        segments.num_items[start:stop],
        segments.is_uniform,
    )


def _num_runs(alike: Sequence[SendPattern], segments: Segments) -> int:
    """Return how many runs the segments have before any merging; raises PlanError for a block of too many."""
    total = 0
    sizes = segments.num_items[:1] if segments.is_uniform else distinct(segments.num_items)
    for size in sizes.tolist():
        of_one = sum(len(pattern.bases) * pattern.copy_of(size).num_runs for pattern in alike)
        check_num_runs(of_one)
        total += of_one * int(np.count_nonzero(segments.num_items == size))
    return total


def _runs(pattern: SendPattern, segments: Segments) -> Iterator[OffsetRuns]:
    """Yield (destination offset, source offset, length) of a pattern's runs, one length at a time."""
    bases = np.array(
        [(base.at_destination, base.source_tensor + base.source_offset) for base in pattern.bases],
        dtype=np.int64,
    )
    sides = (
        (segments.local_block, segments.local_item, pattern.destination_strides),
        (segments.remote_block, segments.remote_item, pattern.source_strides),
    )
    starts = [block * strides.block + item * strides.token for block, item, strides in sides]
    for size in distinct(segments.num_items).tolist():
        copy = pattern.copy_of(size)
        chosen = segments.num_items == size
        at = [starts[side][chosen] + bases[:, side, None] for side in (0, 1)]
        for count, *strides in copy.axes:
            steps = np.arange(count, dtype=np.int64)
            at = [at[side][..., None] + steps * strides[1 - side] for side in (0, 1)]
        lengths = np.full(at[0].size, copy.length, dtype=np.int64)
        yield at[0].ravel(), at[1].ravel(), lengths
