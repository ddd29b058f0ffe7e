"""The runs of one segment's shape: computed once per shape, vectorised.

Here a run is two region offsets for block 0 and a length; `expand` adds block ids and addresses. The
runs of a shape are sorted by local offset, merged where they touch on both sides, and split by local
page. Page after page, and block by block inside a page, memory is then walked forwards.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvxferd.errors import Code, PlanError
from kvxferd.ids import RegionId
from kvxferd.plan.plan import GroupRead, StridePattern, Strides

# Head by head, token by token and byte by byte, 80 layers of 8 heads of 128 bytes and blocks of 32
# tokens are 5 million runs in one block: 120 MiB. A layout that needs more is a mistake.
MAX_RUNS_PER_BLOCK = 1 << 23
PAGES_OVERHEAD_BYTES = 1024  # of Python's objects about the arrays

Int64s = npt.NDArray[np.int64]
OffsetRuns = tuple[Int64s, Int64s, Int64s]  # local offset, remote offset, length


class RegionPair(NamedTuple):
    """The regions and block strides that runs must share to be added to the same blocks."""

    local_region: RegionId
    remote_region: RegionId
    local_block_stride: int
    remote_block_stride: int


class PageRuns:
    """Local pages of equally many runs: arrays of shape (pages, runs per page).

    `is_uniform`: every page is one run, all of one length, so that whole blocks can merge with
    neighbours. `local_pages` and `remote_pages`: where pages begin, from the first page's first run.
    """

    __slots__ = ("is_uniform", "length", "local", "local_pages", "remote", "remote_pages")

    def __init__(self, local: Int64s, remote: Int64s, length: Int64s) -> None:
        self.local, self.remote, self.length = local, remote, length
        self.is_uniform = length.shape[1] == 1 and bool((length == length[0, 0]).all())
        self.local_pages = local[:, :1] - local[0, 0]
        self.remote_pages = remote[:, :1] - remote[0, 0]

    @property
    def num_bytes(self) -> int:
        """Return about how much memory it takes."""
        columns = (self.local, self.remote, self.length, self.local_pages, self.remote_pages)
        return PAGES_OVERHEAD_BYTES + sum(column.nbytes for column in columns)


class SegmentShape(NamedTuple):
    """A segment's first item in each of its two blocks, and its length, in items."""

    local_item: int
    remote_item: int
    num_items: int


def shape_runs(read: GroupRead, shape: SegmentShape) -> dict[RegionPair, list[PageRuns]]:
    """Return a group read's runs for segments of one shape, by region pair and local page.

    Raises PlanError (layout-incompatible) where a block has more than MAX_RUNS_PER_BLOCK runs.
    """
    return {
        key: _split_by_page(runs, key.local_block_stride) for key, runs in block_runs(read, shape).items()
    }


def block_runs(read: GroupRead, shape: SegmentShape) -> dict[RegionPair, OffsetRuns]:
    """Return the runs of one segment in blocks 0, by region pair, in ascending order of local offsets.

    Raises as `shape_runs`.
    """
    num_runs = 0
    parts: dict[RegionPair, list[OffsetRuns]] = {}
    for pattern in read.patterns:
        key = RegionPair(
            pattern.local.region, pattern.remote.region, pattern.local.block, pattern.remote.block
        )
        parts.setdefault(key, []).append(_pattern_runs(pattern, shape))
        num_runs += len(parts[key][-1][0])
        check_num_runs(num_runs)
    return {key: sort_and_merge(runs) for key, runs in parts.items()}


def merge_touching(local: Int64s, remote: Int64s, length: Int64s) -> OffsetRuns:
    """Join neighbours, in the order given, that are contiguous on both sides."""
    if len(local) < 2:
        return local, remote, length
    is_begin = np.empty(len(local), dtype=bool)
    before = length[:-1]
    is_begin[0] = True
    is_begin[1:] = (local[1:] != local[:-1] + before) | (remote[1:] != remote[:-1] + before)
    (begins,) = is_begin.nonzero()
    if len(begins) == len(local):
        return local, remote, length
    return local[begins], remote[begins], np.add.reduceat(length, begins)


def sort_and_merge(parts: list[OffsetRuns]) -> OffsetRuns:
    """Return all runs sorted by local offset, unless they are already, and merged where they touch."""
    if len(parts) == 1:
        local, remote, length = parts[0]
    else:
        local, remote, length = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    if np.count_nonzero(local[1:] < local[:-1]):
        # Stable, so timsort: the parts are ascending already.
        order = np.argsort(local, kind="stable")
        local, remote, length = local[order], remote[order], length[order]
    return merge_touching(local, remote, length)


def distinct(values: Int64s) -> Int64s:
    """Return what `np.unique` does, which first imports `numpy.ma`: 10 ms of a mover's first pull."""
    ordered = np.sort(values)
    is_new = np.ones(len(ordered), dtype=bool)
    is_new[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_new]


def equal_rows(rows: Int64s) -> list[Int64s]:
    """Return the indices of each set of equal rows."""
    if (rows == rows[0]).all():
        return [np.arange(len(rows))]
    found: dict[bytes, list[int]] = {}
    for index, row in enumerate(rows):
        found.setdefault(row.tobytes(), []).append(index)
    return [np.array(members) for members in found.values()]


def _split_by_page(runs: OffsetRuns, page_bytes: int) -> list[PageRuns]:
    """Split sorted runs into pages, and group pages of equally many runs."""
    local, remote, length = runs
    begins = _page_starts(local, length, page_bytes)
    counts = np.diff([*begins, len(local)])
    pages = []
    for count in distinct(counts):
        at = np.asarray(begins)[counts == count][:, None] + np.arange(count)
        pages.append(PageRuns(local[at], remote[at], length[at]))
    return pages


def _page_starts(local: Int64s, length: Int64s, page_bytes: int) -> list[int]:
    """Return the index of each page's first run. A page's runs end within one block stride of its start."""
    begins, at = [], 0
    ends = local + length
    while at < len(local):
        begins.append(at)
        at = max(at + 1, int(np.searchsorted(ends, local[at] + page_bytes, side="right")))
    return begins


def _pattern_runs(pattern: StridePattern, shape: SegmentShape) -> OffsetRuns:
    """Return the runs of every extent of a pattern."""
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
    """Return the runs of one extent at offset 0, from its first item on.

    An axis whose step equals the length of its content, on both sides, lengthens the runs; every
    other axis multiplies them.
    """
    runs = _content_runs(pattern.local, pattern.remote)
    axes = [
        (pattern.num_units, pattern.local.unit, pattern.remote.unit),
        (num_items, pattern.local.token, pattern.remote.token),
    ]
    axes = [axis for axis in axes if axis[0] > 1]
    while True:
        runs = merge_touching(*runs)
        step = int(runs[2][0]) if (runs[2] == runs[2][0]).all() else None
        within = next((axis for axis in axes if axis[1] == step == axis[2]), None)
        if within is None:
            break
        axes.remove(within)
        runs = (runs[0], runs[1], runs[2] * within[0])
    check_num_runs(len(runs[0]) * math.prod(count for count, _, _ in axes) * len(pattern.extents))
    for count, local_step, remote_step in axes:
        at = np.arange(count, dtype=np.int64)[:, None]
        runs = (
            (runs[0] + at * local_step).ravel(),
            (runs[1] + at * remote_step).ravel(),
            np.broadcast_to(runs[2], (count, len(runs[2]))).ravel(),
        )
    return runs


def check_num_runs(num_runs: int) -> None:
    """Raise PlanError (layout-incompatible) for more than MAX_RUNS_PER_BLOCK runs of one block."""
    if num_runs > MAX_RUNS_PER_BLOCK:
        raise PlanError(
            f"cannot expand the plan: one block is scattered over {num_runs} stretches, over "
            f"{MAX_RUNS_PER_BLOCK}",
            Code.LAYOUT_INCOMPATIBLE,
        )


def _content_runs(local: Strides, remote: Strides) -> OffsetRuns:
    """Return one unit's content of one item, cut where either side's chunks end."""
    check_num_runs(max(local.num_chunks, remote.num_chunks))  # before there are arrays of that length
    content = local.num_chunks * local.chunk_bytes
    cuts = distinct(
        np.concatenate([np.arange(0, content, side.chunk_bytes, dtype=np.int64) for side in (local, remote)])
    )
    starts = [cuts // side.chunk_bytes * side.chunk + cuts % side.chunk_bytes for side in (local, remote)]
    return starts[0], starts[1], np.diff(np.append(cuts, content))
