"""Expand a plan and a request's block ids into covering stretches: fewer and longer reads than its runs.

A remote block is read once for all local blocks that it has bytes of, so that block sizes that differ cost
nothing twice. What does not repeat, or does not pay, comes as runs, as from `kvxferd.plan.expand`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from kvxferd.ids import GroupName, Rank, RegionId
from kvxferd.layout import PackedBlocks
from kvxferd.plan.expand import MAX_RUNS, Runs
from kvxferd.plan.plan import GroupRead, Plan
from kvxferd.plan.run_shapes import (
    Int64s,
    OffsetRuns,
    RegionPair,
    SegmentShape,
    block_runs,
    distinct,
    equal_rows,
    merge_touching,
    sort_and_merge,
)
from kvxferd.plan.stretches import StretchClass, StretchForm, cover_block
from kvxferd.plan.table_cache import TableCache
from kvxferd.plan.token_segments import Segments, common_segments

# 6 MiB of arrays: 8 GiB of blocks of 32 KiB.
MAX_STRETCHES = 1 << 18
MAX_BLOCKS_TOGETHER = 16  # local blocks that share one read of a remote block
# Of one read's remote blocks, each with tables of its own. 12 against 16 tokens have three, and the ends:
# sizes without a small common multiple have thousands, and their tables would take seconds.
MAX_SIGNATURES = 64
MAX_REQUEST_TABLE_BYTES = 8 << 20
# Of Python's objects about the arrays.
TABLE_OVERHEAD_BYTES = 512
FORM_OVERHEAD_BYTES = 1 << 10

Signature = tuple[SegmentShape, ...]  # the segments that lie in one remote block


class Stretches(NamedTuple):
    """Stretches of one form, between one pair of regions, in ascending order of the remote address."""

    form: StretchForm
    local_region: RegionId
    remote: Int64s  # addresses
    local: Int64s  # (stretches, local blocks): offsets in the local region

    @property
    def num_bytes(self) -> int:
        """The number of bytes that the copies write."""
        return self.form.num_bytes * len(self.remote)

    @property
    def covered_bytes(self) -> int:
        """The number of bytes that are read."""
        return self.form.size_bytes * len(self.remote)

    @property
    def num_descriptors(self) -> int:
        """The number of reads: one for stretches that follow one another."""
        remote = self.remote
        return 1 + int(np.count_nonzero(remote[1:] != remote[:-1] + self.form.size_bytes))

    def take(self, rows: slice | Int64s) -> Stretches:
        """Return some of them, in the order of `rows`."""
        return self._replace(remote=self.remote[rows], local=self.local[rows])

    def runs(self, local_base: int) -> Runs:
        """Return the same bytes as runs to be read directly, in ascending order of the local address."""
        parts = []
        for copies in self.form.copies:
            local = self.local if copies.block is None else self.local[:, copies.block]
            to, start = local + copies.local, self.remote[:, None] + copies.image
            parts.append((to.ravel(), start.ravel(), np.full(to.size, copies.length, dtype=np.int64)))
        local, remote, length = sort_and_merge(parts)
        return Runs(*(column.view(np.uint64) for column in (local + local_base, remote, length)))


@dataclass(slots=True)
class CoveredRank:
    """What is read from one remote rank: by covering reads, and directly."""

    stretches: list[Stretches] = field(default_factory=list)
    runs: list[Runs] = field(default_factory=list)


class _Table(NamedTuple):
    """How one signature's bytes of one pair of regions are read. `classes` is None: they do not repeat."""

    classes: tuple[StretchClass, ...] | None
    runs: tuple[OffsetRuns, ...]  # by local block, only where there are no classes

    @property
    def num_bytes(self) -> int:
        num_bytes = TABLE_OVERHEAD_BYTES + sum(column.nbytes for runs in self.runs for column in runs)
        for one in self.classes or ():
            num_bytes += FORM_OVERHEAD_BYTES + one.table_bytes
        return num_bytes

    @property
    def num_stretches(self) -> int:
        if self.classes is not None:
            return sum(len(one.remote) for one in self.classes)
        return sum(len(runs[0]) for runs in self.runs)

    @property
    def num_runs(self) -> int:
        """Return how many runs the same bytes are."""
        return sum(one.form.num_copies * len(one.remote) for one in self.classes or ()) + sum(
            len(runs[0]) for runs in self.runs
        )


def _size_of(tables: Mapping[RegionPair, _Table]) -> int:
    return sum(table.num_bytes for table in tables.values())


class _Alike(NamedTuple):
    """Remote blocks of one signature, with the local block of each of its segments."""

    signature: Signature
    remote_block: Int64s  # (blocks,)
    local_block: Int64s  # (blocks, segments)


def always(rank: Rank, form: StretchForm) -> bool:
    """Stretches of any form, from any rank."""
    return True


class _Piece(NamedTuple):
    """What one group read takes from some remote blocks."""

    read: GroupRead
    blocks: _Alike
    tables: dict[RegionPair, _Table]
    apart_share: float  # of all remote blocks of the group read: those that follow no other one of them


class FormCount(NamedTuple):
    """How many stretches of a form a pull reads from a rank, and by how many reads."""

    rank: Rank
    form: StretchForm
    num_stretches: int
    num_descriptors: int  # one for stretches that follow one another


class CoverRequest:
    """One request's block lists, ready to be expanded for one plan."""

    def __init__(self, pieces: list[_Piece]) -> None:
        self._pieces = pieces

    def forms(self) -> Iterator[FormCount]:
        """Yield what the stretches are, from which the cost of each way to read follows."""
        for read, blocks, tables, apart_share in self._pieces:
            for key, table in tables.items():
                for form, remote, _ in table.classes or ():
                    num_stretches = len(remote) * len(blocks.remote_block)
                    # Where a stretch is all of its block, the next block's follows it.
                    share = apart_share if form.size_bytes == key.remote_block_stride else 1.0
                    yield FormCount(read.rank, form, num_stretches, max(1, round(num_stretches * share)))

    def parts(
        self,
        local_bases: Mapping[RegionId, int],
        remote_bases: Mapping[Rank, Mapping[RegionId, int]],
        pays: Callable[[Rank, StretchForm], bool] = always,
        max_stretches: int = MAX_STRETCHES,
        max_runs: int = MAX_RUNS,
    ) -> Iterator[dict[Rank, CoveredRank]]:
        """Yield what to read from each remote rank, in parts of about `max_stretches` stretches at most.

        A part is no more than about `max_runs` runs either, because all of it may come to be read directly.
        The bytes are those of `Expander.expand`, under its conditions. `pays`: whether to cover stretches of
        this form rather than to read their runs directly.
        """
        part: dict[Rank, CoveredRank] = {}
        room = 1.0
        for read, blocks, tables, _ in self._pieces:
            num_stretches = sum(table.num_stretches for table in tables.values())
            num_runs = sum(table.num_runs for table in tables.values())
            per_block = max(num_stretches / max_stretches, num_runs / max_runs)
            start, total = 0, len(blocks.remote_block)
            while start < total:
                if room < per_block and part:
                    yield part
                    part, room = {}, 1.0
                stop = min(total, start + max(1, int(room / per_block)))
                few = blocks._replace(
                    remote_block=blocks.remote_block[start:stop], local_block=blocks.local_block[start:stop]
                )
                target = part.setdefault(read.rank, CoveredRank())
                for key, table in tables.items():
                    _add(
                        target,
                        key,
                        table,
                        few,
                        local_bases,
                        remote_bases[read.rank],
                        partial(pays, read.rank),
                    )
                room -= (stop - start) * per_block
                start = stop
        yield part


class CoverExpander:
    """Expands block lists into stretches for one plan."""

    def __init__(self, plan: Plan, tables: TableCache | None = None) -> None:
        self.plan = plan
        self._tables = TableCache() if tables is None else tables

    def prepare(
        self, local: Mapping[GroupName, PackedBlocks], remote: Mapping[GroupName, PackedBlocks]
    ) -> CoverRequest | None:
        """Return the request of these block lists, which have passed the checks of `Expander.expand`.

        None: too few of its blocks are alike, or their tables are too large.
        """
        pieces = []
        room = MAX_REQUEST_TABLE_BYTES
        for number, read in enumerate(self.plan.group_reads):
            segments = common_segments(read, local[read.local.group], remote[read.remote.group])
            gaps = np.diff(np.sort(segments.remote_block))
            apart_share = (1 + np.count_nonzero(gaps > 1)) / (1 + np.count_nonzero(gaps))
            alike = list(islice(_group_by_remote_block(segments), MAX_SIGNATURES + 1))
            if len(alike) > MAX_SIGNATURES:
                return None
            for blocks in alike:
                make = partial(_make_tables, read, blocks.signature)
                key = ("covering", self.plan.digest, number, blocks.signature)
                tables = self._tables.get(key, make, _size_of)
                room -= _size_of(tables)
                if room < 0 or not tables:
                    return None
                pieces.append(_Piece(read, blocks, tables, apart_share))
        return CoverRequest(pieces)


def _make_tables(read: GroupRead, signature: Signature) -> dict[RegionPair, _Table]:
    """Return how one signature's bytes are read; nothing where they are more than `MAX_RUNS` runs."""
    by_segment = []
    room = MAX_RUNS
    for shape in signature:  # of one block, that may be listed any number of times
        by_segment.append(block_runs(read, shape))
        room -= sum(len(runs[0]) for runs in by_segment[-1].values())
        if room < 0:
            return {}
    tables = {}
    for key in by_segment[0]:
        runs = tuple(segment[key] for segment in by_segment)
        classes = cover_block(runs, key.remote_block_stride)
        tables[key] = _Table(classes, runs if classes is None else ())
    return tables


def _add(
    target: CoveredRank,
    key: RegionPair,
    table: _Table,
    blocks: _Alike,
    local_bases: Mapping[RegionId, int],
    remote_bases: Mapping[RegionId, int],
    pays: Callable[[StretchForm], bool],
) -> None:
    """Add what some remote blocks hold of one pair of regions."""
    remote_at = blocks.remote_block * key.remote_block_stride + remote_bases[key.remote_region]
    local_at = blocks.local_block * key.local_block_stride
    if table.classes is None:
        base = local_bases[key.local_region]
        parts = [
            _runs_of(runs, local_at[:, number] + base, remote_at) for number, runs in enumerate(table.runs)
        ]
        target.runs.append(Runs(*(column.view(np.uint64) for column in sort_and_merge(parts))))
        return
    for form, remote, local in table.classes:
        stretches = Stretches(
            form,
            key.local_region,
            (remote[:, None] + remote_at).ravel(),
            (local[:, None, :] + local_at).reshape(-1, form.num_blocks),
        )
        if np.count_nonzero(stretches.remote[1:] < stretches.remote[:-1]):
            order = np.argsort(stretches.remote, kind="stable")
            stretches = stretches._replace(remote=stretches.remote[order], local=stretches.local[order])
        if pays(form):
            target.stretches.append(stretches)
        else:
            target.runs.append(stretches.runs(local_bases[key.local_region]))


def _runs_of(runs: OffsetRuns, local_at: Int64s, remote_at: Int64s) -> OffsetRuns:
    local = (local_at[:, None] + runs[0]).ravel()
    length = np.broadcast_to(runs[2], (len(local_at), len(runs[2]))).ravel()
    return merge_touching(local, (remote_at[:, None] + runs[1]).ravel(), length)


def _group_by_remote_block(segments: Segments) -> Iterator[_Alike]:
    """Yield the remote blocks by the shapes of the segments that lie in them."""
    if not len(segments.num_items):
        return
    if segments.is_uniform:  # whole blocks, which are rarely listed twice
        shape = SegmentShape(*(int(column[0]) for column in segments[2:5]))
        yield _Alike((shape,), segments.remote_block, segments.local_block[:, None])
        return
    order = np.lexsort((segments.remote_item, segments.remote_block))
    local, remote, local_item, remote_item, num_items = (column[order] for column in segments[:5])
    is_first = np.ones(len(remote), dtype=bool)
    is_first[1:] = remote[1:] != remote[:-1]
    (begins,) = is_first.nonzero()
    position = np.arange(len(remote)) - np.repeat(begins, np.diff(np.append(begins, len(remote))))
    # A block that is listed very often is read more than once.
    (begins,) = (position % MAX_BLOCKS_TOGETHER == 0).nonzero()
    counts = np.diff(np.append(begins, len(remote)))
    shapes = np.stack([local_item, remote_item, num_items], axis=1)
    for count in distinct(counts).tolist():
        rows = begins[counts == count][:, None] + np.arange(count)
        for members in equal_rows(shapes[rows].reshape(len(rows), -1)):
            chosen = rows[members]
            signature = tuple(SegmentShape(*shape) for shape in shapes[chosen[0]].tolist())
            yield _Alike(signature, remote[chosen[:, 0]], local[chosen])
