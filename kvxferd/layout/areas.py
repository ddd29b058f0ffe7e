"""Where the blocks of a layout lie: the ranges of bytes that belong to one block each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from kvxferd.ids import GroupName, RegionId
from kvxferd.layout.tensors import CacheTensor, RankLayout
from kvxferd.layout.validate import axes_of


class BlockArea(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The bytes of a group's blocks that lie together: those of block 0, and the stride to the next."""

    region: RegionId
    group: GroupName
    offset: int  # in the region
    size_bytes: int
    block_stride: int
    blocks_per_id: int


def block_areas(layout: RankLayout) -> tuple[BlockArea, ...]:
    """Return where the blocks of a layout lie.

    Tensors whose bytes inside a block touch are one area, and no area is longer than a block's stride: then
    it has no byte of another block. Tensors whose blocks are interleaved have none, and are never gathered.
    """
    groups = {group.name: group for group in layout.groups}
    by_stride: dict[tuple[RegionId, int], list[BlockArea]] = {}
    for tensor in layout.tensors:
        group = groups[tensor.group]
        (_, _), *inner = axes_of(tensor, group)
        if (area := _area_of(tensor, inner, group.physical_blocks_per_logical)) is not None:
            by_stride.setdefault((tensor.region, tensor.block_stride), []).append(area)
    areas: list[BlockArea] = []
    for alike in by_stride.values():
        alike.sort(key=lambda area: area.offset)
        areas += _join(alike)
    return tuple(areas)


def _area_of(tensor: CacheTensor, inner: Iterable[tuple[int, int]], per_id: int) -> BlockArea | None:
    if not (tensor.num_units and tensor.content_bytes):
        return None
    reach = [(count - 1) * stride for count, stride in inner]
    start = tensor.offset + sum(min(0, step) for step in reach)
    size = tensor.chunk_bytes + sum(map(abs, reach))
    if size > tensor.block_stride:
        return None
    return BlockArea(tensor.region, tensor.group, start, size, tensor.block_stride, per_id)


def _join(areas: Sequence[BlockArea]) -> list[BlockArea]:
    """Join areas of one region and stride, ascending, that touch and belong to one group."""
    joined: list[BlockArea] = []
    for area in areas:
        last = joined[-1] if joined else None
        if last is not None and area.group == last.group and area.blocks_per_id == last.blocks_per_id:
            end = max(last.offset + last.size_bytes, area.offset + area.size_bytes)
            if area.offset <= last.offset + last.size_bytes and end - last.offset <= area.block_stride:
                joined[-1] = msgspec.structs.replace(last, size_bytes=end - last.offset)
                continue
        joined.append(area)
    return joined
