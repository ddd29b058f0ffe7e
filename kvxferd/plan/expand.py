"""From a plan and a request's block ids to runs: what the movers post."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvxferd.ids import GroupName, Rank, RegionId
from kvxferd.layout import PackedBlocks
from kvxferd.plan.distinct import distinct
from kvxferd.plan.plan import GroupRead, Plan
from kvxferd.plan.run_shapes import (
    Int64s,
    OffsetRuns,
    PageRuns,
    RegionPair,
    SegmentShape,
    merge_touching,
    shape_runs,
)
from kvxferd.plan.token_segments import Segments, common_segments

# Equal or dividing block sizes have one shape or a few; 12 against 16 has six. Only sizes with a
# huge common multiple have thousands, and they are cheap to work out again.
MAX_CACHED_SHAPES = 1024
# 24 MiB of arrays. Head by head and token by token (HND against NHD), one block of 80 layers has
# 20,000 runs, and a long request a hundred million.
MAX_RUNS = 1 << 20


class Runs(NamedTuple):
    """Stretches of bytes contiguous on both sides: absolute addresses, local ones ascending per region."""

    local: npt.NDArray[np.uint64]
    remote: npt.NDArray[np.uint64]
    length: npt.NDArray[np.uint64]


class _SegmentBatch(NamedTuple):
    """Segments of one shape, and their rows by class."""

    local_block: Int64s
    remote_block: Int64s
    page_runs: dict[RegionPair, list[PageRuns]]

    @property
    def num_runs(self) -> int:
        """Runs before any merging along the blocks."""
        per_block = sum(cluster.length.size for clusters in self.page_runs.values() for cluster in clusters)
        return per_block * len(self.local_block)

    def slice(self, start: int, stop: int) -> _SegmentBatch:
        """Return some of the segments."""
        return self._replace(
            local_block=self.local_block[start:stop], remote_block=self.remote_block[start:stop]
        )


class Expander:
    """Turns block lists into runs for one plan; keeps the rows of every shape it has seen."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._shapes: list[dict[SegmentShape, dict[RegionPair, list[PageRuns]]]] = [
            {} for _ in plan.group_reads
        ]

    def expand(
        self,
        local: Mapping[GroupName, PackedBlocks],
        remote: Mapping[GroupName, PackedBlocks],
        num_tokens: int,
        local_bases: Mapping[RegionId, int],
        remote_bases: Mapping[Rank, Mapping[RegionId, int]],
    ) -> dict[Rank, Runs]:
        """Return what to read from each remote rank; ranks from which nothing moves are left out.

        The lists must have passed `check_blocks` and `check_request` for `num_tokens`. Blocks are
        read whole as far as both lists reach, so tokens past `num_tokens` in a last block may be
        copied too; no byte outside the listed local blocks is named. Bases are addresses.
        """
        work = list(self._batches_by_read(local, remote))
        return _assemble(work, local_bases, remote_bases)

    def parts(
        self,
        local: Mapping[GroupName, PackedBlocks],
        remote: Mapping[GroupName, PackedBlocks],
        num_tokens: int,
        local_bases: Mapping[RegionId, int],
        remote_bases: Mapping[Rank, Mapping[RegionId, int]],
        max_runs: int = MAX_RUNS,
    ) -> Iterator[dict[Rank, Runs]]:
        """Yield what `expand` returns, in parts of about `max_runs` runs where it would be more.

        Between two parts nothing is merged. A part is larger only if a single block is.
        """
        work = list(self._batches_by_read(local, remote))
        if sum(batch.num_runs for _, batches in work for batch in batches) <= max_runs:
            yield _assemble(work, local_bases, remote_bases)
            return
        for lane, batches in work:
            for batch in batches:
                step = max(1, max_runs * len(batch.local_block) // batch.num_runs)
                for start in range(0, len(batch.local_block), step):
                    yield _assemble([(lane, [batch.slice(start, start + step)])], local_bases, remote_bases)

    def _batches_by_read(
        self, local: Mapping[GroupName, PackedBlocks], remote: Mapping[GroupName, PackedBlocks]
    ) -> Iterator[tuple[GroupRead, list[_SegmentBatch]]]:
        """Yield every lane in which something moves, with its segments."""
        for number, lane in enumerate(self.plan.group_reads):
            segments = common_segments(lane, local[lane.local.group], remote[lane.remote.group])
            if len(segments.num_items):
                yield lane, self._batches(number, lane, segments)

    def _batches(self, number: int, read: GroupRead, segments: Segments) -> list[_SegmentBatch]:
        """Group segments by shape, each in ascending order of its local blocks."""
        places = (segments.local_item, segments.remote_item, segments.num_items)
        if segments.is_uniform:
            alike = SegmentShape(*(int(place[0]) for place in places))
            return [self._batch(number, read, alike, segments.local_block, segments.remote_block)]
        codes = (places[0] << 42) | (places[1] << 21) | places[2]
        batches = []
        for code in [codes[0]] if (codes == codes[0]).all() else distinct(codes):
            mask = codes == code
            packed = int(code)
            shape = SegmentShape(packed >> 42, packed >> 21 & 0x1FFFFF, packed & 0x1FFFFF)
            local, remote = segments.local_block[mask], segments.remote_block[mask]
            batches.append(self._batch(number, read, shape, local, remote))
        return batches

    def _batch(
        self, number: int, read: GroupRead, shape: SegmentShape, local: Int64s, remote: Int64s
    ) -> _SegmentBatch:
        if np.count_nonzero(local[1:] < local[:-1]):
            order = np.argsort(local, kind="stable")
            local, remote = local[order], remote[order]
        return _SegmentBatch(local, remote, self._shape_runs(number, read, shape))

    def _shape_runs(
        self, number: int, read: GroupRead, shape: SegmentShape
    ) -> dict[RegionPair, list[PageRuns]]:
        cached = self._shapes[number]
        if shape not in cached:
            if len(cached) >= MAX_CACHED_SHAPES:
                cached.clear()
            cached[shape] = shape_runs(read, shape)
        return cached[shape]


def _group_read_runs(batches: list[_SegmentBatch]) -> list[tuple[RegionPair, list[OffsetRuns]]]:
    """Return the region offsets of everything that a lane's segments move, by class."""
    classes = []
    for key in batches[0].page_runs:
        grids = [batch.page_runs[key] for batch in batches]
        if _is_one_run_per_page(grids):
            classes.append((key, [_merge_along_blocks(key, batches, [grid[0] for grid in grids])]))
        else:
            rows = [
                _page_runs(key, batch, cluster)
                for batch, grid in zip(batches, grids, strict=True)
                for cluster in grid
            ]
            classes.append((key, rows))
    return classes


def _is_one_run_per_page(grids: list[list[PageRuns]]) -> bool:
    """Whether all shapes move one row per page, and the pages lie alike for every shape."""
    first = grids[0][0]
    for clusters in grids:
        if len(clusters) > 1 or not clusters[0].is_uniform or clusters[0].local.shape != first.local.shape:
            return False
        pages = (clusters[0].local_pages, first.local_pages), (clusters[0].remote_pages, first.remote_pages)
        if any(mine is not firsts and not np.array_equal(mine, firsts) for mine, firsts in pages):
            return False
    return True


def _merge_along_blocks(
    key: RegionPair, batches: list[_SegmentBatch], clusters: list[PageRuns]
) -> OffsetRuns:
    """Merge along the blocks first, then repeat for every page: far fewer sums than block by block."""
    columns = [
        (
            batch.local_block * key.local_block_stride + cluster.local[0, 0],
            batch.remote_block * key.remote_block_stride + cluster.remote[0, 0],
            np.full(len(batch.local_block), cluster.length[0, 0], dtype=np.int64),
        )
        for batch, cluster in zip(batches, clusters, strict=True)
    ]
    local, remote, length = _sort_and_merge(columns)
    pages = clusters[0]
    num_pages = len(pages.local_pages)
    if num_pages == 1:
        return local, remote, length
    lengths = np.empty((num_pages, len(length)), dtype=np.int64)
    lengths[:] = length
    return (pages.local_pages + local).ravel(), (pages.remote_pages + remote).ravel(), lengths.ravel()


def _page_runs(key: RegionPair, batch: _SegmentBatch, cluster: PageRuns) -> OffsetRuns:
    """Return the rows of every page, block by block: (pages, blocks, rows per page), flat."""
    local = cluster.local[:, None, :] + (batch.local_block * key.local_block_stride)[:, None]
    remote = cluster.remote[:, None, :] + (batch.remote_block * key.remote_block_stride)[:, None]
    length = np.broadcast_to(cluster.length[:, None, :], local.shape)
    return local.ravel(), remote.ravel(), length.ravel()


def _sort_and_merge(parts: list[OffsetRuns]) -> OffsetRuns:
    """Join parts, sort by local place if they are not in order yet, and merge what touches."""
    if len(parts) == 1:
        local, remote, length = parts[0]
    else:
        local, remote, length = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    if np.count_nonzero(local[1:] < local[:-1]):
        # Stable, so timsort: the parts are ascending runs already.
        order = np.argsort(local, kind="stable")
        local, remote, length = local[order], remote[order], length[order]
    return merge_touching(local, remote, length)


def _assemble(
    work: Iterable[tuple[GroupRead, list[_SegmentBatch]]],
    local_bases: Mapping[RegionId, int],
    remote_bases: Mapping[Rank, Mapping[RegionId, int]],
) -> dict[Rank, Runs]:
    """Return the runs of some lanes' segments, by remote rank."""
    found: dict[Rank, dict[tuple[RegionId, RegionId], list[OffsetRuns]]] = {}
    for lane, batches in work:
        regions = found.setdefault(lane.rank, {})
        for key, rows in _group_read_runs(batches):
            regions.setdefault((key.local_region, key.remote_region), []).extend(rows)
    return {
        rank: _add_addresses(regions, local_bases, remote_bases[rank])
        for rank, regions in sorted(found.items())
    }


def _add_addresses(
    regions: dict[tuple[RegionId, RegionId], list[OffsetRuns]],
    local_bases: Mapping[RegionId, int],
    remote_bases: Mapping[RegionId, int],
) -> Runs:
    """Add the regions' addresses. Runs never reach across two regions, so each pair is merged by itself."""
    pairs = []
    for (local_region, remote_region), parts in regions.items():
        local, remote, length = _sort_and_merge(parts)
        pairs.append((local + local_bases[local_region], remote + remote_bases[remote_region], length))
    if len(pairs) == 1:
        columns = pairs[0]
    else:
        columns = tuple(np.concatenate(column) for column in zip(*pairs, strict=True))  # type: ignore[assignment]
    return Runs(*(column.view(np.uint64) for column in columns))
