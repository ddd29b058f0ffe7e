"""Cache tensors of states: what a layer caches once per request, and where its parts lie in a page."""

from __future__ import annotations

from collections.abc import Iterator

from kvxferd.ids import RegionId
from kvxferd.layout.presets.deployment_options import ShardPosition
from kvxferd.layout.presets.model_facts import StateComponent
from kvxferd.layout.sharding import shard_units
from kvxferd.layout.tensors import CacheTensor, Group, num_units


def state_bytes(states: tuple[StateComponent, ...], share: ShardPosition) -> int:
    """Return the bytes of one request's state in one layer on a rank."""
    return sum(
        num_units(shard_units(s.num_units, share.tp_size, share.tp_rank)) * s.unit_bytes for s in states
    )


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
    """Yield one layer's states, one behind the other in each page from byte `start` on.

    A convolution's state is [channels, rows] per component (DS: x, B and C each lie together), or,
    row-major, [rows, all channels] (SD: a row runs through x, B and C).
    """
    held = {s.name: shard_units(s.num_units, share.tp_size, share.tp_rank) for s in states}
    row_bytes = sum(num_units(held[s.name]) * s.row_bytes for s in states if s.is_convolution)
    inside = column = 0
    for state in states:
        by_rows = is_row_major and state.is_convolution
        content = state.row_bytes if by_rows else state.unit_bytes
        yield CacheTensor(
            layer=layer,
            component=state.name,
            group=group.name,
            region=region,
            offset=start + (column if by_rows else inside),
            block_stride=page_bytes,
            token_stride=0,
            unit_stride=content,
            units=held[state.name],
            chunk_bytes=content,
            num_chunks=state.rows if by_rows else 1,
            chunk_stride=row_bytes if by_rows else 0,
            itemsize=state.itemsize,
            dtype=state.dtype,
        )
        width = num_units(held[state.name])
        inside += width * state.unit_bytes
        column += width * state.row_bytes
