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
from collections.abc import Iterable, Iterator, Mapping

from kvxferd.errors import Code, PlanError
from kvxferd.ids import Digest, GroupName, Rank, RegionId
from kvxferd.layout import PackedBlocks, RankLayout
from kvxferd.plan.block_list_checks import check_request
from kvxferd.plan.expand import MAX_RUNS
from kvxferd.plan.plan import GroupRead, Plan, Strides
from kvxferd.plan.rank_tensors import RankTensors, TensorShape
from kvxferd.plan.send_pattern import Axis, SendBase, SendPart, SendPattern, StridedCopy
from kvxferd.plan.send_runs import SendRuns, group_read, pair_of, pattern_runs

# Four for each extent that a plan may have: 60 MiB. Only chunk sizes that do not divide each other take more
# than one for an extent: 6 bytes against 4 take four; 997 against 1,009 take 2,005, which no engine has.
MAX_BASES = 1 << 18


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
            pairs = {pair_of(pattern) for pattern in self.patterns if pattern.consumer == consumer}
            reads = tuple(group_read(self.producer, *pair) for pair in pairs)
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
    own = {rank: RankTensors(rank, layout) for rank, layout in sorted(producers.items())}
    patterns: dict[Rank, list[SendPattern]] = {rank: [] for rank in own}
    for consumer in sorted(consumers):
        layout, plan = consumers[consumer]
        theirs = RankTensors(consumer, layout)
        reads: dict[Rank, list[GroupRead]] = {}
        for read in plan.group_reads:
            if read.rank in own:
                reads.setdefault(read.rank, []).append(read)
        for rank, assigned in reads.items():
            patterns[rank].extend(_patterns(own[rank], theirs, assigned))
    return {rank: SenderPlan(rank, tuple(found)) for rank, found in patterns.items()}


def _patterns(own: RankTensors, theirs: RankTensors, reads: Iterable[GroupRead]) -> Iterator[SendPattern]:
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
        bases.sort(key=lambda base: base.at_destination)
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
    rank: Rank, source: TensorShape, consumer: Rank, sink: TensorShape, base: SendBase
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
        pattern.bases[0].at_destination,
    )
