"""Expand a plan and a request's block ids into the runs that a mover posts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvxferd.ids import GroupName, Rank, RegionId
from kvxferd.layout import PackedBlocks, unpack_ids
from kvxferd.plan.plan import GroupRead, Plan
from kvxferd.plan.run_shapes import (
    Int64s,
    OffsetRuns,
    PageRuns,
    RegionPair,
    SegmentShape,
    distinct,
    shape_runs,
    sort_and_merge,
)
from kvxferd.plan.table_cache import TableCache
from kvxferd.plan.token_segments import Segments, common_segments

# 24 MiB of arrays. Head by head and token by token (HND against NHD), one block of 80 layers has
# 20,000 runs, and a long request a hundred million.
MAX_RUNS = 1 << 20
# A request of so few runs, before they are merged, takes half as long without numpy; and no request with more
# bytes of ids has so few.
MAX_SHORT_RUNS = 64
SHORT_RUN_BYTES = 400  # of a run's tuple and numbers
_IDS, _FIRST_TOKEN = attrgetter("ids"), attrgetter("first_token")


class Runs(NamedTuple):
    """Byte ranges contiguous on both sides: absolute addresses, local ones ascending per region."""

    local: npt.NDArray[np.uint64]
    remote: npt.NDArray[np.uint64]
    length: npt.NDArray[np.uint64]


class _SegmentBatch(NamedTuple):
    """Segments of one shape, and that shape's runs by region pair."""

    number: int  # of the group read
    rank: Rank  # that is read
    local_block: Int64s
    remote_block: Int64s
    page_runs: dict[RegionPair, list[PageRuns]]

    @property
    def num_runs(self) -> int:
        """Return how many runs these segments have before any merging along the blocks."""
        per_block = sum(pages.length.size for page_runs in self.page_runs.values() for pages in page_runs)
        return per_block * len(self.local_block)

    def slice(self, start: int, stop: int) -> _SegmentBatch:
        """Return the segments `start` to `stop`."""
        return self._replace(
            local_block=self.local_block[start:stop], remote_block=self.remote_block[start:stop]
        )


class _ShortRun(NamedTuple):
    """A run of any request with lists of one form: it begins at ``ids[at] * stride + offset`` on each side.

    `ids` are those of all lists of the side.
    """

    local_at: int
    local_stride: int
    local_offset: int
    remote_at: int
    remote_stride: int
    remote_offset: int
    length: int


_ShortRuns = dict[Rank, dict[tuple[RegionId, RegionId], list[_ShortRun]]]


class Expander:
    """Expands block lists into runs for one plan. Keeps the runs of each segment shape in a cache."""

    def __init__(self, plan: Plan, tables: TableCache | None = None) -> None:
        self.plan = plan
        self._tables = TableCache() if tables is None else tables
        self._local_groups = tuple(dict.fromkeys(read.local.group for read in plan.group_reads))
        self._remote_groups = tuple(dict.fromkeys(read.remote.group for read in plan.group_reads))

    def expand(
        self,
        local: Mapping[GroupName, PackedBlocks],
        remote: Mapping[GroupName, PackedBlocks],
        num_tokens: int,
        local_bases: Mapping[RegionId, int],
        remote_bases: Mapping[Rank, Mapping[RegionId, int]],
    ) -> dict[Rank, Runs]:
        """Return the runs to read from each remote rank; ranks from which nothing is read are left out.

        The lists must have passed `check_blocks` and `check_request` for `num_tokens`. Blocks are
        read whole as far as both lists reach, so tokens past `num_tokens` in a last block may be
        copied too. No byte outside the listed local blocks is written. Bases are addresses.
        """
        return _assemble(self._batches(local, remote), local_bases, remote_bases)

    def parts(
        self,
        local: Mapping[GroupName, PackedBlocks],
        remote: Mapping[GroupName, PackedBlocks],
        num_tokens: int,
        local_bases: Mapping[RegionId, int],
        remote_bases: Mapping[Rank, Mapping[RegionId, int]],
        max_runs: int = MAX_RUNS,
    ) -> Iterator[dict[Rank, Runs]]:
        """Yield the runs of `expand`, in parts of about `max_runs` runs.

        Between two parts nothing is merged. A part is larger only if a single block is. Of the shapes of a
        request's segments, it holds those of one part at a time.
        """
        mine = list(map(local.__getitem__, self._local_groups))
        theirs = list(map(remote.__getitem__, self._remote_groups))
        if max_runs >= MAX_SHORT_RUNS and (short := self._find_short(mine, theirs)) is not None:
            ids = unpack_ids(b"".join(map(_IDS, mine))), unpack_ids(b"".join(map(_IDS, theirs)))
            if short:
                yield {
                    rank: _place_short(regions, ids, local_bases, remote_bases[rank])
                    for rank, regions in short.items()
                }
            return
        part: list[_SegmentBatch] = []
        room = max_runs
        for batch in self._batches(local, remote):
            num_runs = batch.num_runs
            if part and num_runs > room:
                yield _assemble(part, local_bases, remote_bases)
                part, room = [], max_runs
            if num_runs <= room:
                part.append(batch)
                room -= num_runs
                continue
            step = max(1, max_runs * len(batch.local_block) // num_runs)
            for start in range(0, len(batch.local_block), step):
                yield _assemble([batch.slice(start, start + step)], local_bases, remote_bases)
        if part:
            yield _assemble(part, local_bases, remote_bases)

    def _find_short(self, mine: list[PackedBlocks], theirs: list[PackedBlocks]) -> _ShortRuns | None:
        """Return the runs of requests with lists of this form, kept from an earlier one; None: it is long."""
        lists = (*mine, *theirs)
        sizes = list(map(len, map(_IDS, lists)))
        if sum(sizes) > 8 * MAX_SHORT_RUNS:
            return None
        key = ("short", self.plan.digest, *sizes, *map(_FIRST_TOKEN, lists))
        return self._tables.get(key, partial(self._short_runs, mine, theirs), _size_of_short)

    def _short_runs(self, mine: list[PackedBlocks], theirs: list[PackedBlocks]) -> _ShortRuns | None:
        """Expand lists of this form with the place of each id for the id."""
        sides = (self._local_groups, mine), (self._remote_groups, theirs)
        places = [dict(zip(names, _places(lists), strict=True)) for names, lists in sides]
        found: _ShortRuns = {}
        num_runs = 0
        for batch in self._batches(*places):
            if (num_runs := num_runs + batch.num_runs) > MAX_SHORT_RUNS:
                return None
            for key, page_runs in batch.page_runs.items():
                regions = found.setdefault(batch.rank, {})
                runs = regions.setdefault((key.local_region, key.remote_region), [])
                runs += _runs_at_places(self.plan.group_reads[batch.number], batch, key, page_runs)
        return dict(sorted(found.items()))

    def _batches(
        self, local: Mapping[GroupName, PackedBlocks], remote: Mapping[GroupName, PackedBlocks]
    ) -> Iterator[_SegmentBatch]:
        """Yield each group read's segments by shape, in ascending order of their local blocks."""
        for number, read in enumerate(self.plan.group_reads):
            segments = common_segments(read, local[read.local.group], remote[read.remote.group])
            for shape, mine, theirs in _by_shape(segments):
                key = ("direct", self.plan.digest, number, shape)
                page_runs = self._tables.get(key, partial(shape_runs, read, shape), _size_of)
                yield _SegmentBatch(number, read.rank, mine, theirs, page_runs)


def _size_of(page_runs: Mapping[RegionPair, list[PageRuns]]) -> int:
    return sum(pages.num_bytes for of_pair in page_runs.values() for pages in of_pair)


def _size_of_short(short: _ShortRuns | None) -> int:
    return SHORT_RUN_BYTES * sum(len(runs) for regions in (short or {}).values() for runs in regions.values())


def _places(lists: list[PackedBlocks]) -> Iterator[PackedBlocks]:
    """Return lists of one side's form, with the place of each id among all of them for the id."""
    start = 0
    for listed in lists:
        stop = start + len(listed)
        yield PackedBlocks(np.arange(start, stop, dtype="<i4").tobytes(), listed.first_token, listed.state_at)
        start = stop


def _runs_at_places(
    read: GroupRead, batch: _SegmentBatch, key: RegionPair, page_runs: list[PageRuns]
) -> Iterator[_ShortRun]:
    """Yield a batch's runs between two regions; the ids of its blocks are places."""
    steps = key.local_block_stride, key.remote_block_stride
    per_id = read.local.blocks_per_id, read.remote.blocks_per_id
    for mine, theirs in zip(batch.local_block.tolist(), batch.remote_block.tolist(), strict=True):
        (at, inside), (remote_at, remote_inside) = divmod(mine, per_id[0]), divmod(theirs, per_id[1])
        for pages in page_runs:
            columns = (pages.local.ravel(), pages.remote.ravel(), pages.length.ravel())
            for local, remote, length in zip(*[column.tolist() for column in columns], strict=True):
                yield _ShortRun(
                    at, steps[0] * per_id[0], local + inside * steps[0],
                    remote_at, steps[1] * per_id[1], remote + remote_inside * steps[1],
                    length,
                )  # fmt: skip


def _place_short(
    regions: Mapping[tuple[RegionId, RegionId], list[_ShortRun]],
    ids: tuple[Sequence[int], Sequence[int]],
    local_bases: Mapping[RegionId, int],
    remote_bases: Mapping[RegionId, int],
) -> Runs:
    """Return the runs of a request with these ids as addresses, as `_add_addresses` does."""
    mine, theirs = ids
    columns: tuple[list[int], list[int], list[int]] = ([], [], [])
    locals_, remotes, lengths = columns
    for (local_region, remote_region), runs in regions.items():
        local_base, remote_base = local_bases[local_region], remote_bases[remote_region]
        placed = [
            (mine[at] * stride + offset, theirs[remote_at] * remote_stride + remote_offset, length)
            for at, stride, offset, remote_at, remote_stride, remote_offset, length in runs
        ]
        placed.sort()
        local_end = remote_end = -1
        for local, remote, length in placed:
            if local == local_end and remote == remote_end:
                lengths[-1] += length
            else:
                locals_.append(local_base + local)
                remotes.append(remote_base + remote)
                lengths.append(length)
            local_end, remote_end = local + length, remote + length
    return Runs(*[np.array(column, dtype=np.uint64) for column in columns])


def _by_shape(segments: Segments) -> Iterator[tuple[SegmentShape, Int64s, Int64s]]:
    """Yield each shape with the local and remote blocks of its segments, local ones ascending."""
    if not len(segments.num_items):
        return
    if segments.is_uniform:
        shape = SegmentShape(*[int(column[0]) for column in segments[2:5]])
        yield shape, *_ascending(segments.local_block, segments.remote_block)
        return
    codes = (segments.local_item << 42) | (segments.remote_item << 21) | segments.num_items
    for code in [int(codes[0])] if (codes == codes[0]).all() else distinct(codes).tolist():
        mask = codes == code
        shape = SegmentShape(code >> 42, code >> 21 & 0x1FFFFF, code & 0x1FFFFF)
        yield shape, *_ascending(segments.local_block[mask], segments.remote_block[mask])


def _ascending(local: Int64s, remote: Int64s) -> tuple[Int64s, Int64s]:
    if not np.count_nonzero(local[1:] < local[:-1]):
        return local, remote
    order = np.argsort(local, kind="stable")
    return local[order], remote[order]


def _group_read_runs(batches: list[_SegmentBatch]) -> list[tuple[RegionPair, list[OffsetRuns]]]:
    """Return the runs of a group read's segments as region offsets, by region pair."""
    classes = []
    for key in batches[0].page_runs:
        by_shape = [batch.page_runs[key] for batch in batches]
        if _is_one_run_per_page(by_shape):
            classes.append(
                (key, [_merge_along_blocks(key, batches, [page_runs[0] for page_runs in by_shape])])
            )
        else:
            runs = [
                _page_runs(key, batch, pages)
                for batch, page_runs in zip(batches, by_shape, strict=True)
                for pages in page_runs
            ]
            classes.append((key, runs))
    return classes


def _is_one_run_per_page(by_shape: list[list[PageRuns]]) -> bool:
    """Whether every shape has one run per page, and the same distances between pages."""
    first = by_shape[0][0]
    for page_runs in by_shape:
        if len(page_runs) > 1 or not page_runs[0].is_uniform or page_runs[0].local.shape != first.local.shape:
            return False
        starts = (
            (page_runs[0].local_pages, first.local_pages),
            (page_runs[0].remote_pages, first.remote_pages),
        )
        if any(mine is not firsts and not np.array_equal(mine, firsts) for mine, firsts in starts):
            return False
    return True


def _merge_along_blocks(
    key: RegionPair, batches: list[_SegmentBatch], page_runs: list[PageRuns]
) -> OffsetRuns:
    """Return the runs merged along the blocks once, and repeated for every page.

    This takes far fewer sums than merging block by block.
    """
    columns = [
        (
            batch.local_block * key.local_block_stride + pages.local[0, 0],
            batch.remote_block * key.remote_block_stride + pages.remote[0, 0],
            pages.length[0].repeat(len(batch.local_block)),
        )
        for batch, pages in zip(batches, page_runs, strict=True)
    ]
    local, remote, length = sort_and_merge(columns)
    pages = page_runs[0]
    num_pages = len(pages.local_pages)
    if num_pages == 1:
        return local, remote, length
    lengths = np.empty((num_pages, len(length)), dtype=np.int64)
    lengths[:] = length
    return (pages.local_pages + local).ravel(), (pages.remote_pages + remote).ravel(), lengths.ravel()


def _page_runs(key: RegionPair, batch: _SegmentBatch, pages: PageRuns) -> OffsetRuns:
    """Return the runs of every page, block by block: (pages, blocks, runs per page), flat."""
    local = pages.local[:, None, :] + (batch.local_block * key.local_block_stride)[:, None]
    remote = pages.remote[:, None, :] + (batch.remote_block * key.remote_block_stride)[:, None]
    length = np.broadcast_to(pages.length[:, None, :], local.shape)
    return local.ravel(), remote.ravel(), length.ravel()


def _assemble(
    part: Iterable[_SegmentBatch],
    local_bases: Mapping[RegionId, int],
    remote_bases: Mapping[Rank, Mapping[RegionId, int]],
) -> dict[Rank, Runs]:
    """Return the runs of some batches, by remote rank; those of one group read follow each other."""
    found: dict[Rank, dict[tuple[RegionId, RegionId], list[OffsetRuns]]] = {}
    for (rank, _), batches in groupby(part, key=attrgetter("rank", "number")):
        regions = found.setdefault(rank, {})
        for key, runs in _group_read_runs(list(batches)):
            regions.setdefault((key.local_region, key.remote_region), []).extend(runs)
    return {
        rank: _add_addresses(regions, local_bases, remote_bases[rank])
        for rank, regions in sorted(found.items())
    }


def _add_addresses(
    regions: dict[tuple[RegionId, RegionId], list[OffsetRuns]],
    local_bases: Mapping[RegionId, int],
    remote_bases: Mapping[RegionId, int],
) -> Runs:
    """Return the runs as addresses. No run spans two regions, so each pair of regions is merged alone."""
    pairs = []
    for (local_region, remote_region), parts in regions.items():
        local, remote, length = sort_and_merge(parts)
        pairs.append((local + local_bases[local_region], remote + remote_bases[remote_region], length))
    if len(pairs) == 1:
        columns = pairs[0]
    else:
        columns = tuple(np.concatenate(column) for column in zip(*pairs, strict=True))  # type: ignore[assignment]
    return Runs(*[column.view(np.uint64) for column in columns])
