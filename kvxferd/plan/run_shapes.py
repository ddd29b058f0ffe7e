"""The stretches of bytes that one segment's shape moves: computed once per shape, vectorised.

A row is one stretch contiguous on both sides, given as two region offsets for block 0 and a length.
The rows of a shape are sorted by local offset, merged where they touch on both sides, and cut into
clusters: rows that lie within one local page. Block by block inside a cluster, and cluster after
cluster, memory is then walked forwards.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvxferd.errors import Code, PlanError
from kvxferd.ids import RegionId
from kvxferd.plan.distinct import distinct
from kvxferd.plan.plan import GroupRead, StridePattern, Strides

# Head by head, token by token and byte by byte, 80 layers of 8 heads of 128 bytes and blocks of 32
# tokens are 5 million stretches in one block: 120 MiB. More is no layout but a mistake.
MAX_RUNS_PER_BLOCK = 1 << 23

Int64s = npt.NDArray[np.int64]
OffsetRuns = tuple[Int64s, Int64s, Int64s]  # local offset, remote offset, length


class RegionPair(NamedTuple):
    """What rows must share to be added to the same blocks."""

    local_region: RegionId
    remote_region: RegionId
    local_block_stride: int
    remote_block_stride: int


class PageRuns:
    """Local pages of equally many rows: arrays of shape (pages, rows per page).

    `is_uniform`: every page is one row of one length, so that whole blocks can merge with
    neighbours. `local_pages` and `remote_pages`: where pages begin, from the first one's first row.
    """

    __slots__ = ("is_uniform", "length", "local", "local_pages", "remote", "remote_pages")

    def __init__(self, local: Int64s, remote: Int64s, length: Int64s) -> None:
        self.local, self.remote, self.length = local, remote, length
        self.is_uniform = length.shape[1] == 1 and bool((length == length[0, 0]).all())
        self.local_pages = local[:, :1] - local[0, 0]
        self.remote_pages = remote[:, :1] - remote[0, 0]


class SegmentShape(NamedTuple):
    """Where a segment lies in its two blocks, and how long it is, in items."""

    local_item: int
    remote_item: int
    num_items: int


def shape_runs(read: GroupRead, shape: SegmentShape) -> dict[RegionPair, list[PageRuns]]:
    """Return the rows of every class of a lane for segments of one shape.

    Raises PlanError (layout-incompatible) where a block is scattered over more than MAX_ROWS stretches.
    """
    num_rows = 0
    parts: dict[RegionPair, list[OffsetRuns]] = {}
    for strip in read.patterns:
        key = RegionPair(strip.local.region, strip.remote.region, strip.local.block, strip.remote.block)
        parts.setdefault(key, []).append(_pattern_runs(strip, shape))
        num_rows += len(parts[key][-1][0])
        _check_num_runs(num_rows)
    return {key: _split_by_page(_sort_and_merge(rows), key.local_block_stride) for key, rows in parts.items()}


def merge_touching(local: Int64s, remote: Int64s, length: Int64s) -> OffsetRuns:
    """Join neighbours, in the order given, that are contiguous on both sides."""
    if len(local) < 2:
        return local, remote, length
    is_begin = np.ones(len(local), dtype=bool)
    before = length[:-1]
    is_begin[1:] = (local[1:] != local[:-1] + before) | (remote[1:] != remote[:-1] + before)
    (begins,) = is_begin.nonzero()
    if len(begins) == len(local):
        return local, remote, length
    return local[begins], remote[begins], np.add.reduceat(length, begins)


def _sort_and_merge(parts: list[OffsetRuns]) -> OffsetRuns:
    """Return all rows sorted by local offset and merged."""
    local, remote, length = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.argsort(local, kind="stable")
    return merge_touching(local[order], remote[order], length[order])


def _split_by_page(rows: OffsetRuns, page_bytes: int) -> list[PageRuns]:
    """Cut sorted rows into pages, and file pages of equally many rows together."""
    local, remote, length = rows
    begins = _page_starts(local, length, page_bytes)
    counts = np.diff([*begins, len(local)])
    clusters = []
    for count in distinct(counts):
        at = np.asarray(begins)[counts == count][:, None] + np.arange(count)
        clusters.append(PageRuns(local[at], remote[at], length[at]))
    return clusters


def _page_starts(local: Int64s, length: Int64s, page_bytes: int) -> list[int]:
    """Return the index of the first row of each page: rows that end within one block stride of it."""
    begins, at = [], 0
    ends = local + length
    while at < len(local):
        begins.append(at)
        at = max(at + 1, int(np.searchsorted(ends, local[at] + page_bytes, side="right")))
    return begins


def _pattern_runs(pattern: StridePattern, shape: SegmentShape) -> OffsetRuns:
    """Return the rows of every piece of a strip."""
    local, remote, length = _extent_runs(pattern, shape.num_items)
    local = local + shape.local_item * pattern.local.token
    remote = remote + shape.remote_item * pattern.remote.token
    starts = np.array([(p.local_offset, p.remote_offset) for p in pattern.extents], dtype=np.int64)
    return (
        (starts[:, 0, None] + local).ravel(),
        (starts[:, 1, None] + remote).ravel(),
        np.broadcast_to(length, (len(starts), len(length))).ravel(),
    )


def _extent_runs(pattern: StridePattern, num_items: int) -> OffsetRuns:
    """Return the rows of one piece at offset 0, from its first item on.

    An axis whose step equals the length of what lies inside it, on both sides, lengthens the rows;
    every other axis multiplies them.
    """
    _check_num_runs(max(pattern.local.num_chunks, pattern.remote.num_chunks))
    rows = _content_runs(pattern.local, pattern.remote)
    axes = [
        (pattern.num_units, pattern.local.unit, pattern.remote.unit),
        (num_items, pattern.local.token, pattern.remote.token),
    ]
    axes = [axis for axis in axes if axis[0] > 1]
    while True:
        rows = merge_touching(*rows)
        step = int(rows[2][0]) if (rows[2] == rows[2][0]).all() else None
        within = next((axis for axis in axes if axis[1] == step == axis[2]), None)
        if within is None:
            break
        axes.remove(within)
        rows = (rows[0], rows[1], rows[2] * within[0])
    _check_num_runs(len(rows[0]) * math.prod(count for count, _, _ in axes) * len(pattern.extents))
    for count, local_step, remote_step in axes:
        at = np.arange(count, dtype=np.int64)[:, None]
        rows = (
            (rows[0] + at * local_step).ravel(),
            (rows[1] + at * remote_step).ravel(),
            np.broadcast_to(rows[2], (count, len(rows[2]))).ravel(),
        )
    return rows


def _check_num_runs(num_rows: int) -> None:
    if num_rows > MAX_RUNS_PER_BLOCK:
        raise PlanError(
            f"cannot expand the plan: one block is scattered over {num_rows} stretches, over "
            f"{MAX_RUNS_PER_BLOCK}",
            Code.LAYOUT_INCOMPATIBLE,
        )


def _content_runs(local: Strides, remote: Strides) -> OffsetRuns:
    """Return one unit's content of one item, cut wherever either side's chunks end."""
    _check_num_runs(max(local.num_chunks, remote.num_chunks))  # before there are arrays of that length
    content = local.num_chunks * local.chunk_bytes
    cuts = distinct(
        np.concatenate([np.arange(0, content, side.chunk_bytes, dtype=np.int64) for side in (local, remote)])
    )
    places = [cuts // side.chunk_bytes * side.chunk + cuts % side.chunk_bytes for side in (local, remote)]
    return places[0], places[1], np.diff(np.append(cuts, content))
