"""Cache tensors of tokens: where the components of an array lie, in any arrangement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kvxferd.ids import RegionId
from kvxferd.layout.presets.deployment_options import (
    AXIS_ORDERS,
    CHUNK_BYTES,
    VECTORISED,
    DeploymentOptions,
    ShardPosition,
)
from kvxferd.layout.presets.model_facts import TokenComponent
from kvxferd.layout.sharding import shard_units
from kvxferd.layout.tensors import CacheTensor, Group, UnitRange, num_units


class AxisStrides(NamedTuple):
    """The stride of each axis and the size of the whole array, in bytes."""

    layer: int
    component: int
    block: int
    unit: int
    token: int
    total: int


def axis_strides(
    layout: str, axis_lengths: dict[str, int], content_bytes: int, page_bytes: int = 0
) -> AxisStrides:
    """Return the strides of an array in the arrangement called `layout`.

    `axis_lengths` has the length of each axis by its letter (see `AXIS_ORDERS`). `page_bytes`, where
    given, is the least number of bytes from one block to the next: pages are padded up to it.
    """
    strides: dict[str, int] = {}
    step = content_bytes
    for axis in reversed(AXIS_ORDERS[layout]):
        if axis == "b":
            step = max(step, page_bytes)
        strides[axis] = step
        step *= axis_lengths[axis]
    return AxisStrides(strides["l"], strides["c"], strides["b"], strides["n"], strides["t"], step)


def held_units(component: TokenComponent, share: ShardPosition) -> tuple[UnitRange, ...]:
    """Return the heads that a rank holds of a component."""
    if component.is_replicated:
        return (UnitRange(0, component.num_heads),)
    return shard_units(component.num_heads, share.tp_size, share.tp_rank)


class TokenArray:
    """The components of one array in one group: the offsets and strides of each layer's tensors."""

    def __init__(
        self,
        components: tuple[TokenComponent, ...],
        choices: DeploymentOptions,
        share: ShardPosition,
        group: Group,
        num_layers: int,
    ) -> None:
        self._components = components
        self._group = group
        self._is_vectorised = choices.arrangement == VECTORISED
        self._block_tokens = group.block_tokens // group.physical_blocks_per_logical
        self._units = {c.name: held_units(c, share) for c in components}
        self._axis_lengths = {
            "l": num_layers,
            "c": len(components),
            "b": group.num_blocks * group.physical_blocks_per_logical,
        }
        sizes = {(c.head_bytes, c.granule_tokens, c.num_heads, c.is_replicated) for c in components}
        arrange = self._uniform_strides if len(sizes) == 1 else self._concatenated_strides
        self._strides, self._starts = arrange("HND" if self._is_vectorised else choices.arrangement, choices)
        first = self._strides[components[0].name]
        self.block_bytes = first.block
        self.total_bytes = first.total

    def _uniform_strides(
        self, arrangement: str, choices: DeploymentOptions
    ) -> tuple[Mapping[str, AxisStrides], Mapping[str, int]]:
        """Return strides and starts for components of one size, which are an axis of the array."""
        first = self._components[0]
        extents = self._axis_lengths | self._inner_axis_lengths(first)
        strides = axis_strides(arrangement, extents, first.head_bytes, choices.page_bytes)
        starts = {c.name: position * strides.component for position, c in enumerate(self._components)}
        return dict.fromkeys(starts, strides), starts

    def _concatenated_strides(
        self, arrangement: str, choices: DeploymentOptions
    ) -> tuple[Mapping[str, AxisStrides], Mapping[str, int]]:
        """Return strides and starts for components of unequal sizes, one behind the other in each block."""
        order = arrangement.partition("-")[0]
        starts: dict[str, int] = {}
        inner: dict[str, AxisStrides] = {}
        page = 0
        for component in self._components:
            extents = {"l": 1, "c": 1, "b": 1} | self._inner_axis_lengths(component)
            starts[component.name] = page
            inner[component.name] = axis_strides(order, extents, component.head_bytes)
            page += inner[component.name].total
        num_layers, num_blocks = self._axis_lengths["l"], self._axis_lengths["b"]
        if choices.has_cross_layer_pages:
            layer, block = page, max(page * num_layers, choices.page_bytes)
            total = block * num_blocks
        else:
            block = max(page, choices.page_bytes)
            layer = block * num_blocks
            total = layer * num_layers
        found = {name: s._replace(layer=layer, block=block, total=total) for name, s in inner.items()}
        return found, starts

    def _inner_axis_lengths(self, component: TokenComponent) -> dict[str, int]:
        return {
            "n": num_units(self._units[component.name]),
            "t": self._block_tokens // component.granule_tokens,
        }

    def tensors(self, layers: Sequence[int], start: int, region: RegionId) -> Iterator[CacheTensor]:
        """Yield the tensors of these layers for an array that begins at byte `start` of the region."""
        for index, layer in enumerate(layers):
            for component in self._components:
                strides = self._strides[component.name]
                chunk_bytes, token_stride, chunk_stride = self._content_chunks(component, strides)
                yield CacheTensor(
                    layer=layer,
                    component=component.name,
                    group=self._group.name,
                    region=region,
                    offset=start + index * strides.layer + self._starts[component.name],
                    block_stride=strides.block,
                    token_stride=token_stride,
                    unit_stride=strides.unit,
                    units=self._units[component.name],
                    chunk_bytes=chunk_bytes,
                    num_chunks=component.head_bytes // chunk_bytes,
                    chunk_stride=chunk_stride,
                    granule_tokens=component.granule_tokens,
                    itemsize=component.itemsize,
                    dtype=component.dtype,
                    encoding=component.encoding,
                )

    def _content_chunks(self, component: TokenComponent, strides: AxisStrides) -> tuple[int, int, int]:
        """Return (chunk bytes, token stride, chunk stride) of one head's content of one token."""
        if not self._is_vectorised:
            return component.head_bytes, strides.token, 0
        chunk = CHUNK_BYTES if component.name == "k" else component.itemsize
        if component.head_bytes % chunk:
            raise ValueError(
                f"cannot deploy with layout {VECTORISED!r}: the {component.head_bytes} bytes of "
                f"{component.name!r} are no whole number of {chunk}"
            )
        return chunk, chunk, chunk * (strides.unit // component.head_bytes)
