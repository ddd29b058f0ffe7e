"""The byte ranges that one decode rank reads: those of block 0 on both sides, component by component."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from kvxferd.explain.analysis import DecodeRankReads
from kvxferd.ids import Rank, RegionId
from kvxferd.layout import GroupKind, PackedBlocks, UnitRange, pack_ids
from kvxferd.plan import Expander, Plan
from kvxferd.plan.plan import GroupRead, StridePattern

_BLOCK_0 = pack_ids([0])


class ByteRanges(NamedTuple):
    """One component of one layer from one prefill rank: what block 0 of decode takes from block 0 of prefill.

    Offsets are bytes in the regions. Every further block lies one stride further on each side.
    """

    source: Rank
    kind: GroupKind
    layer: int
    component: str
    units: UnitRange
    decode_region: RegionId
    prefill_region: RegionId
    runs: tuple[tuple[int, int, int], ...]  # decode offset, prefill offset, bytes
    decode_block_stride: int
    prefill_block_stride: int

    @property
    def pattern(self) -> tuple[object, ...]:
        """What layers laid out alike have in common: everything but the layer and where it begins."""
        local, remote, _ = self.runs[0]
        relative = tuple((a - local, b - remote, length) for a, b, length in self.runs)
        return (self.source, self.kind, self.component, self.units, relative, *self[5:7], *self[8:])

    @property
    def num_bytes(self) -> int:
        """Of all runs."""
        return sum(length for _, _, length in self.runs)


def byte_ranges(reads: DecodeRankReads) -> list[ByteRanges]:
    """Return the ranges of every component that a rank reads, by source, layer and component."""
    found = [
        ranges
        for lane in reads.plan.group_reads
        for strip in lane.patterns
        for ranges in _pattern_ranges(reads.plan, lane, strip)
    ]
    return sorted(found, key=lambda r: (r.source, r.layer, r.component, r.units.start))


def _pattern_ranges(plan: Plan, lane: GroupRead, strip: StridePattern) -> Iterator[ByteRanges]:
    """Yield the ranges of each piece of a strip: expanded by itself, so that its runs stay its own."""
    local = {lane.local.group: PackedBlocks(_BLOCK_0)}
    remote = {lane.remote.group: PackedBlocks(_BLOCK_0)}
    for piece in strip.extents:
        alone = msgspec.structs.replace(strip, extents=(piece,))
        part = msgspec.structs.replace(plan, group_reads=(msgspec.structs.replace(lane, patterns=(alone,)),))
        runs = Expander(part).expand(
            local, remote, 1, {strip.local.region: 0}, {lane.rank: {strip.remote.region: 0}}
        )
        columns = runs[lane.rank] if runs else ((), (), ())
        listed = zip(*(list(map(int, column)) for column in columns), strict=True)
        yield ByteRanges(
            lane.rank,
            lane.local.kind,
            piece.layer,
            piece.component,
            UnitRange(piece.first_unit, piece.first_unit + strip.num_units),
            strip.local.region,
            strip.remote.region,
            tuple(listed),
            strip.local.block,
            strip.remote.block,
        )


class LayersInStep(NamedTuple):
    """Layers of one component whose ranges differ only by equal steps."""

    first: ByteRanges
    layers: tuple[int, ...]
    decode_step: int  # bytes from one of the layers to the next; 0 for one layer alone
    prefill_step: int


def group_layers_in_step(ranges: list[ByteRanges]) -> list[LayersInStep]:
    """Return the ranges with layers in equal steps together, in the order in which they come first."""
    found: dict[tuple[object, ...], list[LayersInStep]] = {}
    for item in ranges:
        last = found.setdefault(item.pattern, [])
        if last and (longer := _extended(last[-1], item)):
            last[-1] = longer
        else:
            last.append(LayersInStep(item, (item.layer,), 0, 0))
    return [alike for group in found.values() for alike in group]


def _extended(alike: LayersInStep, item: ByteRanges) -> LayersInStep | None:
    """Return the layers with one more, if it follows in step."""
    count = len(alike.layers)
    steps = tuple(item.runs[0][side] - alike.first.runs[0][side] for side in (0, 1))
    if any(step % count for step in steps):
        return None
    decode_step, prefill_step = (step // count for step in steps)
    if count > 1 and (decode_step, prefill_step) != (alike.decode_step, alike.prefill_step):
        return None
    return LayersInStep(alike.first, (*alike.layers, item.layer), decode_step, prefill_step)
