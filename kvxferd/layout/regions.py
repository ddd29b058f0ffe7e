"""A cache as in-engine connectors describe it, derived from its strides: blocks first, K and V apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvxferd.ids import RegionId
from kvxferd.layout import CacheTensor, Group, GroupKind, RankLayout


class CacheProperties(NamedTuple):
    """How blocks lie; at most one of `cross_layers_blocks` and `split_k_and_v` holds."""

    is_kv_layout_blocks_first: bool  # K and V of a block lie in one page
    cross_layers_blocks: bool  # all layers of a block lie in one page
    split_k_and_v: bool  # K and V are registered as two regions


class TransferRegion(NamedTuple):
    """One region as in-engine connectors register it."""

    base_addr: int
    block_len: int  # bytes from one block to the next
    kv_block_len: int  # bytes of them that are this region's: half a page where K and V share one


def cache_properties(layout: RankLayout) -> CacheProperties:
    """Return the properties of a rank's attention cache; a rank without one has none of them."""
    layers = _attention_layers(layout)
    if not layers:
        return CacheProperties(False, False, False)
    first = layers[min(layers)]
    others = [tensors[0] for layer, tensors in layers.items() if layer != first[0].layer]
    is_shared = any(_same_page(first[0], other) for other in others)
    is_pair = len(first) > 1
    is_paged = is_pair and _same_page(first[0], first[1])
    return CacheProperties(is_paged, is_shared, is_pair and not is_paged and not is_shared)


def cache_properties_of_shapes(
    test_shape: Sequence[int],
    tensor_shape: Sequence[int] | None = None,
    *,
    is_mla: bool = False,
    is_hybrid: bool = False,
) -> CacheProperties:
    """Return the properties from a backend's shape for one block, and the shape of the real tensor.

    `test_shape` has 1 where the number of blocks goes: (1, 2, 16, 1, 1) is blocks first,
    (2, 1, 16, 1, 1) K and V apart. A tensor with one dimension more holds all layers. A hybrid of
    attention and states is blocks first whatever its shapes are.
    """
    is_cross = tensor_shape is not None and len(tensor_shape) == len(test_shape) + 1
    is_blocks_first = is_hybrid or (len(test_shape) == 5 and test_shape[0] == 1 and not is_mla)
    return CacheProperties(is_blocks_first, is_cross, not (is_cross or is_mla or is_blocks_first))


def expand_region(base_addr: int, block_len: int, *, is_blocks_first: bool) -> list[TransferRegion]:
    """Return the regions that one registered region stands for: two halves where blocks hold K and V."""
    if not is_blocks_first:
        return [TransferRegion(base_addr, block_len, block_len)]
    half = block_len // 2
    return [TransferRegion(base_addr, block_len, half), TransferRegion(base_addr + half, block_len, half)]


def get_transfer_cache_regions(layout: RankLayout, bases: Mapping[RegionId, int]) -> list[TransferRegion]:
    """Return every tensor of attention and of states as a region, in order of layer and offset.

    There is one per layer and component, with the bytes that the component has in a block, as
    `expand_region` returns them for K and V in one page, and for an array of either. A state has all of
    its bytes in one block.
    """
    groups = {group.name: group for group in layout.groups}
    return [
        transfer_region(tensor, groups[tensor.group], bases[tensor.region])
        for tensor in sorted(layout.tensors, key=lambda t: (t.layer, t.offset))
        if tensor.num_units
    ]


def transfer_region(tensor: CacheTensor, group: Group, base_addr: int) -> TransferRegion:
    """Return one tensor as a region. `base_addr`: the address of the exported region that it lies in."""
    items = 1
    if group.kind is GroupKind.ATTENTION:
        items = group.block_tokens // group.physical_blocks_per_logical // tensor.granule_tokens
    payload = items * tensor.num_units * tensor.content_bytes
    return TransferRegion(base_addr + tensor.offset, tensor.block_stride, payload)


def _attention_layers(layout: RankLayout) -> dict[int, list[CacheTensor]]:
    """Return the tensors of each attention layer that hold bytes, ordered by offset."""
    groups = {group.name: group for group in layout.groups}
    layers: dict[int, list[CacheTensor]] = {}
    for tensor in sorted(layout.tensors, key=lambda t: t.offset):
        if groups[tensor.group].kind is GroupKind.ATTENTION and tensor.num_units:
            layers.setdefault(tensor.layer, []).append(tensor)
    return layers


def _same_page(first: CacheTensor, second: CacheTensor) -> bool:
    """Whether block 0 of both lies within one block stride."""
    return (
        first.region == second.region
        and first.block_stride == second.block_stride
        and abs(first.offset - second.offset) < first.block_stride
    )
