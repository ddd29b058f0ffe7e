"""A plan's byte ranges: those of block 0 on both sides, component by component."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvxferd.ids import Rank, RegionId
from kvxferd.layout import GroupKind, PackedBlocks, UnitRange, pack_ids
from kvxferd.plan import Expander, Plan
from kvxferd.plan.plan import GroupRead, StridePattern

_BLOCK_0 = pack_ids([0])


class ByteRanges(msgspec.Struct, frozen=True):
    """The ranges of one component of one layer that a plan's rank has in common with a remote rank.

    Offsets are bytes in the regions, for block 0 on both sides. Every further block lies one stride further
    on each side.
    """

    remote_rank: Rank
    kind: GroupKind
    layer: int
    component: str
    units: UnitRange
    local_region: RegionId
    remote_region: RegionId
    runs: tuple[tuple[int, int, int], ...]  # local offset, remote offset, bytes
    local_block_stride: int
    remote_block_stride: int

    @property
    def shape(self) -> tuple[object, ...]:
        """The fields that layers of equal layout share: all but the layer and where it begins."""
        local, remote, _ = self.runs[0]
        relative = tuple((a - local, b - remote, length) for a, b, length in self.runs)
        sides = (self.local_region, self.remote_region, self.local_block_stride, self.remote_block_stride)
        return (self.remote_rank, self.kind, self.component, self.units, relative, sides)

    @property
    def num_bytes(self) -> int:
        """The bytes of all runs."""
        return sum(length for _, _, length in self.runs)


def byte_ranges(plan: Plan) -> list[ByteRanges]:
    """Return the ranges of every component in a plan, by remote rank, layer and component."""
    found = [
        ranges
        for group_read in plan.group_reads
        for pattern in group_read.patterns
        for ranges in _pattern_ranges(plan, group_read, pattern)
    ]
    return sorted(found, key=lambda r: (r.remote_rank, r.layer, r.component, r.units.start))


def _pattern_ranges(plan: Plan, group_read: GroupRead, pattern: StridePattern) -> Iterator[ByteRanges]:
    """Yield the ranges of each extent of a pattern, each expanded alone, so that its runs are not merged."""
    local = {group_read.local.group: PackedBlocks(_BLOCK_0)}
    remote = {group_read.remote.group: PackedBlocks(_BLOCK_0)}
    for extent in pattern.extents:
        alone = msgspec.structs.replace(pattern, extents=(extent,))
        part = msgspec.structs.replace(
            plan, group_reads=(msgspec.structs.replace(group_read, patterns=(alone,)),)
        )
        runs = Expander(part).expand(
            local, remote, 1, {pattern.local.region: 0}, {group_read.rank: {pattern.remote.region: 0}}
        )
        columns = runs[group_read.rank] if runs else ((), (), ())
        listed = zip(*(list(map(int, column)) for column in columns), strict=True)
        yield ByteRanges(
            group_read.rank,
            group_read.local.kind,
            extent.layer,
            extent.component,
            UnitRange(extent.first_unit, extent.first_unit + pattern.num_units),
            pattern.local.region,
            pattern.remote.region,
            tuple(listed),
            pattern.local.block,
            pattern.remote.block,
        )
