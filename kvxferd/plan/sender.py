"""The sender's plan: which bytes a producer rank that pushes sends to each consumer rank.

Everything is seen from the producer: its own layout says where the bytes lie, the consumer's layout where
they go. An entry is a `SendPattern`: bases and a strided copy (counts, strides, length). `SenderPlan.runs`
turns a request's block ids into offsets and lengths.

Shared with the reader's plan: which rank serves a unit (the consumer's plan decides, so that replicas do
not all send), the checks of a request (`check_request`), which tokens two block lists and two token shards
have in common (`common_segments`, `shared_fraction`), a tensor's strides (`strides_of`), and the merging of
runs that touch (`sort_and_merge`). Offsets, chunks and the runs of a block are computed here, from
the two layouts alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from kvxferd.errors import Code, PlanError
from kvxferd.ids import Digest, GroupName, Rank, RegionId
from kvxferd.layout import CacheTensor, GroupKind, PackedBlocks, RankLayout, UnitRange
from kvxferd.plan.assignment import shared_fraction
from kvxferd.plan.block_list_checks import check_request
from kvxferd.plan.expand import MAX_RUNS
from kvxferd.plan.plan import (
    BlockGeometry,
    Extent,
    GroupRead,
    Plan,
    Strides,
    block_geometry,
    strides_of,
)
from kvxferd.plan.run_shapes import Int64s, OffsetRuns, check_num_runs, distinct, sort_and_merge
from kvxferd.plan.token_segments import Segments, common_segments

# Four for each extent that a plan may have: 60 MiB. Only chunk sizes that do not divide each other take more
# than one for an extent: 6 bytes against 4 take four; 997 against 1,009 take 2,005, which no engine has.
MAX_BASES = 1 << 18
_NO_BLOCKS = PackedBlocks(b"")


class Axis(NamedTuple):
    """Positions at equal distances, each a stride further than the one before; strides in bytes."""

    num_positions: int
    source_stride: int
    destination_stride: int


class StridedCopy(NamedTuple):
    """`length` contiguous bytes at every position along the axes; once if there is no axis."""

    axes: tuple[Axis, ...]
    length: int

    @property
    def num_runs(self) -> int:
        """Return at how many positions bytes lie."""
        return math.prod(axis.num_positions for axis in self.axes)

    @property
    def num_bytes(self) -> int:
        """Return the bytes at all positions."""
        return self.num_runs * self.length


class SendBase(NamedTuple):
    """Where a pattern begins: consecutive units of one component of one layer. Offsets are bytes.

    In its region a block's copy begins at tensor + offset + block * block stride, on either side.
    """

    layer: int
    component: str
    first_unit: int  # global
    source_tensor: int  # the cache tensor's offset in the producer's region
    destination_tensor: int
    source_offset: int  # from the component's first unit, in the producer's block
    destination_offset: int


class SendPart(NamedTuple):
    """The triple of in-engine senders: source offset, destination offset, length, for whole blocks."""

    consumer: Rank
    layer: int
    component: str
    source_offset: int  # bytes from the component's first unit, in the producer's block
    destination_offset: int  # bytes from the component's first unit, in the consumer's block
    length: int  # bytes, contiguous on both sides


@dataclasses.dataclass(frozen=True, slots=True)
class SendPattern:
    """One stride pattern: the same copy from every base to one consumer rank.

    `content` is what is copied of one item (the tokens of a granule; a whole state), its axes outermost
    first. `copy_of` adds the axis of the items that lie in one kernel block on both sides.
    """

    consumer: Rank
    source: BlockGeometry
    destination: BlockGeometry
    granule_tokens: int
    source_strides: Strides
    destination_strides: Strides
    bases: tuple[SendBase, ...]
    content: StridedCopy

    def copy_of(self, num_items: int) -> StridedCopy:
        """Return the copy of consecutive items, in the fewest runs: what touches on both sides is joined."""
        items = Axis(num_items, self.source_strides.token, self.destination_strides.token)
        return _fold((*self.content.axes, items), self.content.length)

    @property
    def num_items(self) -> int:
        """Return the items of the longest copy that repeats through any two lists that begin together.

        Block sizes of 12 and 16 tokens repeat every 4 tokens. Lists that begin apart may need shorter
        copies; `runs` takes the longest that the lists allow.
        """
        if self.source.kind is GroupKind.STATE:
            return 1
        sizes = [self.source.block_tokens, self.destination.block_tokens]
        if self.source.shard != self.destination.shard:
            shards = (self.source.shard, self.destination.shard)
            sizes += [shard.interleave for shard in shards if shard.count > 1]
        return math.gcd(*sizes) // self.granule_tokens

    @property
    def copy(self) -> StridedCopy:
        """Return the copy of `num_items` items."""
        return self.copy_of(self.num_items)

    @property
    def is_whole_block(self) -> bool:
        """Whether the copy is that of one whole kernel block on each side."""
        tokens = self.num_items * self.granule_tokens
        return self.source.kind is GroupKind.STATE or (
            tokens == self.source.block_tokens == self.destination.block_tokens
        )

    def parts(self) -> list[SendPart]:
        """Return a triple for each base.

        Raises ValueError where a triple cannot express the copy: blocks differ in size, or what is
        sent of a block is not contiguous on both sides.
        """
        copy = self.copy
        if copy.axes:
            raise self._no_triple(f"it takes {copy.num_runs} runs")
        if not self.is_whole_block:
            sizes = f"{self.source.block_tokens} and {self.destination.block_tokens}"
            raise self._no_triple(f"blocks of {sizes} tokens have {copy.length} bytes in common")
        return [
            SendPart(self.consumer, b.layer, b.component, b.source_offset, b.destination_offset, copy.length)
            for b in self.bases
        ]

    def _no_triple(self, why: str) -> ValueError:
        return ValueError(
            f"cannot give a block of group {self.source.group!r} to {self.consumer} as one offset and one "
            f"length: {why}"
        )

    def num_bytes(self, num_tokens: int) -> Fraction:
        """Return the bytes of a request of `num_tokens` tokens; of a state, whatever the tokens.

        Blocks that are partly filled count in part: it is a fraction where an item has several tokens,
        or where ranks share the tokens.
        """
        of_an_item = self.content.num_bytes * len(self.bases)
        if self.source.kind is GroupKind.STATE:
            return Fraction(of_an_item)
        both = shared_fraction(self.destination.shard, self.source.shard)
        return of_an_item * num_tokens * both / self.granule_tokens


class SendRuns(NamedTuple):
    """Byte ranges contiguous on both sides, as offsets in two regions; the destination's ascend."""

    consumer: Rank
    source_region: RegionId
    destination_region: RegionId
    source_offset: Int64s
    destination_offset: Int64s
    length: Int64s


@dataclasses.dataclass(frozen=True, slots=True)
class SenderPlan:
    """What one producer rank sends to the ranks of one engine; no patterns if no rank reads it."""

    producer: Rank
    patterns: tuple[SendPattern, ...]  # in order of consumer

    @property
    def consumers(self) -> tuple[Rank, ...]:
        """Return the ranks to which something is sent, in ascending order."""
        return tuple(dict.fromkeys(pattern.consumer for pattern in self.patterns))

    def parts(self) -> list[SendPart]:
        """Return all triples by consumer, layer, component and offset; raises ValueError like a pattern's."""
        return sorted(part for pattern in self.patterns for part in pattern.parts())

    def runs(
        self,
        source: Mapping[GroupName, PackedBlocks],
        destination: Mapping[GroupName, PackedBlocks],
        num_tokens: int,
        max_runs: int = MAX_RUNS,
    ) -> Iterator[SendRuns]:
        """Yield what is sent of a request whose blocks are `source` here and `destination` at the consumers.

        `destination` lists the groups of every consumer. Blocks are sent whole as far as both lists
        reach, as the consumers would read them. Runs are merged within what is yielded, which has
        over about `max_runs` runs only if one block has. Each side's lists have passed its `check_blocks`.
        Raises PlanError (tokens-not-published) where the source lacks a token that a consumer requires,
        and EngineError (blocks-invalid) for ids that the side which listed them cannot have.
        """
        for consumer in self.consumers:
            pairs = {_pair_of(pattern) for pattern in self.patterns if pattern.consumer == consumer}
            reads = tuple(_group_read(self.producer, *pair) for pair in pairs)
            check_request(Plan(consumer, Digest(""), reads), destination, source, num_tokens)
        yield from pattern_runs(self.patterns, source, destination, max_runs)


def sender_plan(
    producer: Rank, layout: RankLayout, consumers: Mapping[Rank, tuple[RankLayout, Plan]]
) -> SenderPlan:
    """Return what the rank `producer` with `layout` sends.

    `consumers` has the ranks that read this engine, with layouts and plans; one that does not read
    `producer` may be left out. All producers together send each byte of each consumer exactly once, as
    the plans prove. A rank that no plan reads, for instance a replica, sends nothing. Raises PlanError
    (layout-incompatible) for a plan that was not made from these layouts.
    """
    return sender_plans({producer: layout}, consumers)[producer]


def sender_plans(
    producers: Mapping[Rank, RankLayout], consumers: Mapping[Rank, tuple[RankLayout, Plan]]
) -> dict[Rank, SenderPlan]:
    """Return the plan of each of some producers, as `sender_plan` does; each layout is indexed once."""
    own = {rank: _RankTensors(rank, layout) for rank, layout in sorted(producers.items())}
    patterns: dict[Rank, list[SendPattern]] = {rank: [] for rank in own}
    for consumer in sorted(consumers):
        layout, plan = consumers[consumer]
        theirs = _RankTensors(consumer, layout)
        reads: dict[Rank, list[GroupRead]] = {}
        for read in plan.group_reads:
            if read.rank in own:
                reads.setdefault(read.rank, []).append(read)
        for rank, assigned in reads.items():
            patterns[rank].extend(_patterns(own[rank], theirs, assigned))
    return {rank: SenderPlan(rank, tuple(found)) for rank, found in patterns.items()}


def pattern_runs(
    patterns: Iterable[SendPattern],
    source: Mapping[GroupName, PackedBlocks],
    destination: Mapping[GroupName, PackedBlocks],
    max_runs: int = MAX_RUNS,
) -> Iterator[SendRuns]:
    """Yield the runs of some patterns like `SenderPlan.runs`, of lists that need no check."""
    segments: dict[_GeometryPair, Segments] = {}
    regions: dict[tuple[Rank, RegionId, RegionId], dict[_GeometryPair, list[SendPattern]]] = {}
    for pattern in patterns:
        pair = _pair_of(pattern)
        if pair not in segments:
            theirs = destination[pair.destination.group]
            mine = source.get(pair.source.group, _NO_BLOCKS)
            segments[pair] = common_segments(_group_read(pattern.consumer, *pair), theirs, mine)
        if len(segments[pair].num_items):
            key = (pattern.consumer, pattern.source_strides.region, pattern.destination_strides.region)
            regions.setdefault(key, {}).setdefault(pair, []).append(pattern)
    for (consumer, source_region, destination_region), together in regions.items():
        work = [(alike, segments[pair]) for pair, alike in together.items()]
        for part in _split(work, max_runs):
            columns = [runs for alike, some in part for pattern in alike for runs in _runs(pattern, some)]
            at_destination, at_source, length = sort_and_merge(columns)
            yield SendRuns(consumer, source_region, destination_region, at_source, at_destination, length)


class _GeometryPair(NamedTuple):
    """What decides which tokens two block lists have in common."""

    destination: BlockGeometry
    source: BlockGeometry
    granule_tokens: int


_Work = list[tuple[list[SendPattern], Segments]]


def _pair_of(pattern: SendPattern) -> _GeometryPair:
    return _GeometryPair(pattern.destination, pattern.source, pattern.granule_tokens)


def _group_read(rank: Rank, destination: BlockGeometry, source: BlockGeometry, granule: int) -> GroupRead:
    """Return the read that answers the sending, as far as checks and segments need it."""
    return GroupRead(rank, destination, source, granule, ())


# --- from layouts to patterns


class _TensorShape(NamedTuple):
    """What tensors of many layers share: everything but their offsets and units."""

    geometry: BlockGeometry
    strides: Strides
    granule_tokens: int


class _HeldUnits(NamedTuple):
    """Where consecutive units begin on a rank."""

    shape: int  # index of the tensor's shape
    tensor_offset: int
    offset: int  # from the component's first unit


class _RankTensors:
    """One rank's cache tensors by layer and component, and where units lie in them."""

    def __init__(self, rank: Rank, layout: RankLayout) -> None:
        self.rank = rank
        self.shapes: list[_TensorShape] = []
        self._numbers: dict[_TensorShape, int] = {}
        self._tensors = {(tensor.layer, tensor.component): tensor for tensor in layout.tensors}
        self._tensor_shapes: dict[tuple[int, str], int] = {}
        self._geometries = {group.name: block_geometry(group) for group in layout.groups}
        self._positions: dict[tuple[tuple[UnitRange, ...], int, int], int | None] = {}

    def find(self, extent: Extent, num_units: int) -> _HeldUnits:
        """Return where an extent's units begin here; raises PlanError unless they are held in a row.

        The extent's own offsets, which the reader's planner computed, are not read.
        """
        tensor = self._tensors.get((extent.layer, extent.component))
        position = None
        if tensor is not None:
            key = (tensor.units, extent.first_unit, num_units)
            if key not in self._positions:
                self._positions[key] = _position(*key)
            position = self._positions[key]
        if tensor is None or position is None:
            raise PlanError(
                f"cannot plan what is sent: {num_units} units from {extent.first_unit} on of layer "
                f"{extent.layer}'s component {extent.component!r} do not lie in a row on rank {self.rank}",
                Code.LAYOUT_INCOMPATIBLE,
            )
        return _HeldUnits(self._shape(tensor), tensor.offset, position * tensor.unit_stride)

    def _shape(self, tensor: CacheTensor) -> int:
        """Return the index of a tensor's shape in `shapes`."""
        name = (tensor.layer, tensor.component)
        if name not in self._tensor_shapes:
            shape = _TensorShape(self._geometries[tensor.group], strides_of(tensor), tensor.granule_tokens)
            if shape not in self._numbers:
                self._numbers[shape] = len(self.shapes)
                self.shapes.append(shape)
            self._tensor_shapes[name] = self._numbers[shape]
        return self._tensor_shapes[name]


def _patterns(own: _RankTensors, theirs: _RankTensors, reads: Iterable[GroupRead]) -> Iterator[SendPattern]:
    """Yield what `own` sends for some reads of `theirs`, in order of groups, regions and destination."""
    found: dict[tuple[int, int, int], list[SendBase]] = {}  # by both shapes and the number of units
    for read in reads:
        for pattern in read.patterns:
            for extent in pattern.extents:
                source = own.find(extent, pattern.num_units)
                sink = theirs.find(extent, pattern.num_units)
                base = SendBase(
                    extent.layer,
                    extent.component,
                    extent.first_unit,
                    source.tensor_offset,
                    sink.tensor_offset,
                    source.offset,
                    sink.offset,
                )
                found.setdefault((source.shape, sink.shape, pattern.num_units), []).append(base)
    num_bases = 0
    patterns: list[SendPattern] = []
    for (source_shape, sink_shape, num_units), bases in found.items():
        source_side, sink_side = own.shapes[source_shape], theirs.shapes[sink_shape]
        _check_same_items(own.rank, source_side, theirs.rank, sink_side, bases[0])
        bases.sort(key=_destination)
        num_bases += len(bases) * _num_pieces(source_side.strides, sink_side.strides)
        if num_bases > MAX_BASES:
            raise PlanError(
                f"cannot plan what {own.rank} sends to {theirs.rank}: the chunks of both cut it into "
                f"{num_bases} pieces, over {MAX_BASES}",
                Code.LAYOUT_INCOMPATIBLE,
            )
        for source_at, sink_at, content in _contents(source_side.strides, sink_side.strides, num_units):
            patterns.append(
                SendPattern(
                    theirs.rank,
                    source_side.geometry,
                    sink_side.geometry,
                    source_side.granule_tokens,
                    source_side.strides,
                    sink_side.strides,
                    tuple(_moved(base, source_at, sink_at) for base in bases),
                    content,
                )
            )
    yield from sorted(patterns, key=_memory_order)


def _check_same_items(
    rank: Rank, source: _TensorShape, consumer: Rank, sink: _TensorShape, base: SendBase
) -> None:
    """Raise PlanError unless an item has as many bytes and tokens on both sides."""
    sides = [
        (
            shape.strides.num_chunks * shape.strides.chunk_bytes,
            shape.granule_tokens,
            shape.geometry.kind.value,
        )
        for shape in (source, sink)
    ]
    if sides[0] != sides[1]:
        raise PlanError(
            f"cannot plan what is sent of layer {base.layer}'s component {base.component!r}: (content bytes, "
            f"granule, kind) is {sides[0]} on {rank} and {sides[1]} on {consumer}",
            Code.LAYOUT_INCOMPATIBLE,
        )


def _num_pieces(source: Strides, sink: Strides) -> int:
    """Return how many copies `_contents` yields."""
    period = math.lcm(source.chunk_bytes, sink.chunk_bytes)
    chunks = [period // side.chunk_bytes for side in (source, sink)]
    return 1 if min(chunks) == 1 else sum(chunks) - 1


def _contents(source: Strides, sink: Strides, num_units: int) -> Iterator[tuple[int, int, StridedCopy]]:
    """Yield the copies that one item of all units takes, each with its offset on both sides.

    It takes one copy unless the chunk sizes of the two sides do not divide each other. Then the cuts
    between chunks repeat after their least common multiple, and each piece of that is a copy.
    """
    units = Axis(num_units, source.unit, sink.unit)
    period = math.lcm(source.chunk_bytes, sink.chunk_bytes)
    repeats = Axis(
        source.num_chunks * source.chunk_bytes // period,
        period // source.chunk_bytes * source.chunk,
        period // sink.chunk_bytes * sink.chunk,
    )
    least = min(source.chunk_bytes, sink.chunk_bytes)
    if _num_pieces(source, sink) == 1:
        steps = (side.chunk if side.chunk_bytes == least else least for side in (source, sink))
        yield 0, 0, StridedCopy((units, repeats, Axis(period // least, *steps)), least)
        return
    cuts = {period}
    for side in (source, sink):
        cuts.update(range(0, period, side.chunk_bytes))
    for start, stop in itertools.pairwise(sorted(cuts)):
        source_at, sink_at = (
            start // side.chunk_bytes * side.chunk + start % side.chunk_bytes for side in (source, sink)
        )
        yield source_at, sink_at, StridedCopy((units, repeats), stop - start)


def _fold(axes: Iterable[Axis], length: int) -> StridedCopy:
    """Return the copy without the axes along which it is contiguous on both sides."""
    left = [axis for axis in axes if axis.num_positions > 1]
    while True:
        within = next((a for a in left if a.source_stride == length == a.destination_stride), None)
        if within is None:
            return StridedCopy(tuple(left), length)
        left.remove(within)
        length *= within.num_positions


def _position(units: tuple[UnitRange, ...], first: int, count: int) -> int | None:
    """Return the position of unit `first`; None unless `count` units from it on are held in a row."""
    position, expected, left = 0, first, count
    found: int | None = None
    for held in units:
        if found is None and held.start <= first < held.stop:
            found = position + first - held.start
            expected, left = held.stop, count - (held.stop - first)
        elif found is not None and left > 0:
            if held.start != expected:
                return None
            expected, left = held.stop, left - (held.stop - held.start)
        position += held.stop - held.start
    return found if left <= 0 else None


def _destination(base: SendBase) -> int:
    return base.destination_tensor + base.destination_offset


def _moved(base: SendBase, source: int, destination: int) -> SendBase:
    """Return the base some bytes further on each side."""
    if source == destination == 0:
        return base
    return base._replace(
        source_offset=base.source_offset + source, destination_offset=base.destination_offset + destination
    )


def _memory_order(pattern: SendPattern) -> tuple[GroupName, GroupName, RegionId, RegionId, int, int]:
    return (
        pattern.source.group,
        pattern.destination.group,
        pattern.source_strides.region,
        pattern.destination_strides.region,
        pattern.granule_tokens,
        _destination(pattern.bases[0]),
    )


# --- from patterns to runs


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
        [(_destination(base), base.source_tensor + base.source_offset) for base in pattern.bases],
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
