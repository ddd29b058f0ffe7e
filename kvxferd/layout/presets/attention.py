"""Plain attention caches, K and V apart, in the arrangements that engines use."""

from __future__ import annotations

from typing import NamedTuple

from kvxferd.ids import GroupName, RegionId
from kvxferd.layout.engine import EngineSpec
from kvxferd.layout.sharding import shard_units, stage_layers
from kvxferd.layout.tensors import CacheTensor, Group, RankLayout, RegionSpec, num_units

# An arrangement is the order of the axes, outermost first. `l`: layer, `c`: K or V, `b`: block,
# `n`: head, `t`: token. The content of a head (head_dim x itemsize) is always innermost.
_AXIS_ORDERS: dict[str, str] = {
    "HND": "lcbnt",  # K/V split first: [layer][2, blocks, heads, tokens, head_dim]
    "NHD": "lcbtn",  # [layer][2, blocks, tokens, heads, head_dim]
    "HND-blocks-first": "lbcnt",  # [layer][blocks, 2, heads, tokens, head_dim]
    "NHD-blocks-first": "lbctn",
    "HND-cross-layer": "blcnt",  # one page holds every layer of a block
    "NHD-cross-layer": "blctn",
    "HND-packed": "lbntc",  # K and V of one head and token side by side
    "NHD-packed": "lbtnc",
}

LAYOUT_NAMES: tuple[str, ...] = tuple(_AXIS_ORDERS)


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

    `axis_lengths` has the length of each axis by its letter (see `_AXIS_ORDERS`). `page_bytes`, where
    given, is the least number of bytes from one block to the next: pages are padded up to it.
    Raises ValueError for an unknown name.
    """
    if layout not in _AXIS_ORDERS:
        raise ValueError(f"cannot build layout {layout!r}: the names are {', '.join(LAYOUT_NAMES)}")
    strides: dict[str, int] = {}
    step = content_bytes
    for axis in reversed(_AXIS_ORDERS[layout]):
        if axis == "b":
            step = max(step, page_bytes)
        strides[axis] = step
        step *= axis_lengths[axis]
    return AxisStrides(strides["l"], strides["c"], strides["b"], strides["n"], strides["t"], step)


def attention_layout(
    *,
    spec: EngineSpec,
    num_kv_heads: int,
    head_dim: int,
    block_tokens: int,
    num_blocks: int,
    itemsize: int = 2,
    dtype: str = "bfloat16",
    layout: str = "HND",
    start_layer: int | None = None,
    end_layer: int | None = None,
    group: str = "full",
    region: str = "kv",
    page_bytes: int = 0,
) -> RankLayout:
    """Return the layout of one rank of a plain attention model: components "k" and "v" per layer.

    The rank is `spec.rank`. Heads are divided as by `shard_units`, layers as by `stage_layers` unless
    `start_layer` and `end_layer` are given. All tensors lie in one region, which has no unused bytes
    beside padding. Raises ValueError for an unknown `layout`.
    """
    first, last = stage_layers(spec.num_layers, spec.pp_size, spec.pp_rank)
    first = first if start_layer is None else start_layer
    last = last if end_layer is None else end_layer
    units = shard_units(num_kv_heads, spec.tp_size, spec.tp_rank)
    content = head_dim * itemsize
    lengths = {"l": last - first, "c": 2, "b": num_blocks, "n": num_units(units), "t": block_tokens}
    strides = axis_strides(layout, lengths, content, page_bytes)
    tensors = tuple(
        CacheTensor(
            layer=layer,
            component=component,
            group=GroupName(group),
            region=RegionId(region),
            offset=(layer - first) * strides.layer + index * strides.component,
            block_stride=strides.block,
            token_stride=strides.token,
            unit_stride=strides.unit,
            units=units,
            chunk_bytes=content,
            itemsize=itemsize,
            dtype=dtype,
        )
        for layer in range(first, last)
        for index, component in enumerate(("k", "v"))
    )
    return RankLayout(
        start_layer=first,
        end_layer=last,
        groups=(Group(name=GroupName(group), num_blocks=num_blocks, block_tokens=block_tokens),),
        tensors=tensors,
        regions=(RegionSpec(region=RegionId(region), size_bytes=strides.total),),
    )
