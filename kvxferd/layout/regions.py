"""A cache as in-engine connectors describe it, derived from its strides: blocks first, K and V apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvxferd.ids import GroupName, RegionId
from kvxferd.layout.tensors import CacheTensor, GroupKind, RankLayout


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


def get_transfer_cache_regions(
    layout: RankLayout, bases: Mapping[RegionId, int] | None = None
) -> list[TransferRegion]:
    """Return every tensor of attention and of states as a region, in order of layer and offset.

    There is one per layer and component, with the bytes that the component has in a kernel block: two halves
    of a page that holds K and V. A state has all of its bytes in one block. `bases` are the addresses of
    the exported regions; without them every one begins at 0.
    """
    groups = {group.name: group for group in layout.groups}
    regions = []
    for tensor in _filled_tensors(layout):
        group, items = groups[tensor.group], 1
        if group.kind is GroupKind.ATTENTION:
            items = group.block_tokens // group.physical_blocks_per_logical // tensor.granule_tokens
        base = 0 if bases is None else bases[tensor.region]
        payload = items * tensor.num_units * tensor.content_bytes
        regions.append(TransferRegion(base + tensor.offset, tensor.block_stride, payload))
    return regions


def block_bytes(layout: RankLayout) -> dict[GroupName, int]:
    """Return the bytes that one block id of each group stands for on this rank."""
    groups = {group.name: group for group in layout.groups}
    sizes = dict.fromkeys(groups, 0)
    for tensor, region in zip(_filled_tensors(layout), get_transfer_cache_regions(layout), strict=True):
        group = groups[tensor.group]
        per_id = 1 if group.kind is GroupKind.STATE else group.physical_blocks_per_logical
        sizes[group.name] += region.kv_block_len * per_id
    return sizes


def _filled_tensors(layout: RankLayout) -> list[CacheTensor]:
    """Return the tensors that hold bytes, in order of layer and offset."""
    return sorted((t for t in layout.tensors if t.num_units), key=lambda t: (t.layer, t.offset))


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
