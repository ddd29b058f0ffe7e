"""Cache tensors of states: what a layer caches once per request, and where its parts lie in a page."""

from __future__ import annotations

from collections.abc import Iterator

from kvxferd.ids import RegionId
from kvxferd.layout.conv_split import ConvPart, MambaConvSplitInfo
from kvxferd.layout.presets.deployment_options import ShardPosition
from kvxferd.layout.presets.model_facts import StateComponent
from kvxferd.layout.sharding import shard_units
from kvxferd.layout.tensors import CacheTensor, Group, UnitRange, num_units


def state_bytes(states: tuple[StateComponent, ...], share: ShardPosition) -> int:
    """Return the bytes of one request's state in one layer on a rank."""
    return sum(num_units(_held_units(s, share)) * s.unit_bytes for s in states)


def _held_units(state: StateComponent, share: ShardPosition) -> tuple[UnitRange, ...]:
    if state.is_replicated:
        return (UnitRange(0, state.num_units),)
    return shard_units(state.num_units, share.tp_size, share.tp_rank)


def _columns(state: StateComponent, units: tuple[UnitRange, ...]) -> tuple[UnitRange, ...]:
    """Return the columns of some heads or groups of a convolution."""
    width = state.row_bytes // state.itemsize
    return tuple(UnitRange(held.start * width, held.stop * width) for held in units)


def state_tensors(
    states: tuple[StateComponent, ...],
    share: ShardPosition,
    group: Group,
    *,
    layer: int,
    start: int,
    page_bytes: int,
    region: RegionId,
    is_row_major: bool,
) -> Iterator[CacheTensor]:
    """Yield one layer's states, one behind the other in each page from byte `start` on, convolutions first.

    The parts of a convolution have as many rows and bytes an item; their units are columns, not heads or
    groups. Row-major is SD, else DS.
    """
    held = {s.name: _held_units(s, share) for s in states}
    convolution = [state for state in states if state.is_convolution]
    if convolution:
        first = convolution[0]
        split = MambaConvSplitInfo(
            tuple(ConvPart(s.name, _columns(s, held[s.name])) for s in convolution),
            first.rows,
            first.itemsize,
            not is_row_major,
        )
        yield from split.tensors(layer, group.name, region, start, page_bytes, first.dtype)
        start += split.num_bytes
    for state in states:
        if state.is_convolution:
            continue
        yield CacheTensor(
            layer=layer,
            component=state.name,
            group=group.name,
            region=region,
            offset=start,
            block_stride=page_bytes,
            token_stride=0,
            unit_stride=state.unit_bytes,
            units=held[state.name],
            chunk_bytes=state.unit_bytes,
            itemsize=state.itemsize,
            dtype=state.dtype,
            encoding=state.encoding,
        )
        start += num_units(held[state.name]) * state.unit_bytes
