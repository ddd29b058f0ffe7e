"""Attention caches: cache tensors from the tensor that vLLM makes for a layer.

vLLM 0.29 and later make one tensor [blocks, heads, tokens, content] a layer, whatever the order in
memory (LBHNC, LBNHC, LHBNC, BLHNC, BLNHC, BHLNC: its strides). The attention backend decides what the
content is. Before, tensors had five axes, [2, blocks, tokens, heads, head_size] or
[blocks, 2, tokens, heads, head_size].
"""

from __future__ import annotations

from typing import NamedTuple

from kvxferd.errors import LayoutError
from kvxferd.ids import GroupName
from kvxferd.integrations.vllm.layout.cpu_attention import HalfPacking, key_packing, value_packing
from kvxferd.integrations.vllm.layout.facts import AttentionFacts, LayerFacts, LayerKey, layer_error
from kvxferd.integrations.vllm.layout.support import BACKENDS, BlockContent
from kvxferd.layout import CacheTensor, UnitRange
from kvxferd.layout.tensor_views import TensorView

_INDEXER_SCALE_BYTES = 4  # one float32 for each 128 bytes of key
_INDEXER_KEY_BYTES = 128


class _KvStrides(NamedTuple):
    """Byte strides of a cache's axes, and where keys and values begin."""

    block: int
    head: int
    token: int
    key_offset: int
    value_offset: int


def attention_tensors(
    layer: LayerFacts,
    cache: AttentionFacts,
    key: LayerKey,
    view: TensorView,
    group: GroupName,
    heads: UnitRange,
) -> list[CacheTensor]:
    """Return one layer's cache tensors, for a view that has passed `check_shape`.

    Raises LayoutError, naming the layer, for a backend, dtype or shape that is not supported.
    """
    if cache.is_indexer:
        return _indexer_tensors(layer, cache, key, view, group)
    if cache.head_size_v == 0:
        return _latent_tensors(layer, cache, key, view, group)
    content = _content_of(layer)
    if content is BlockContent.CPU_PACKED:
        return _cpu_tensors(layer, cache, key, view, group, heads)
    if content is not BlockContent.KEY_THEN_VALUE:
        raise _unknown_block(layer)
    grid = _kv_strides(layer, cache, view)
    return [
        CacheTensor(
            layer=key.layer,
            component=key.component(name),
            group=group,
            region=view.region,
            offset=view.offset + offset,
            block_stride=grid.block,
            token_stride=grid.token,
            unit_stride=grid.head,
            units=(heads,),
            chunk_bytes=size * cache.itemsize,
            itemsize=cache.itemsize,
            dtype=cache.dtype,
            encoding=cache.encoding,
        )
        for name, offset, size in (
            ("k", grid.key_offset, cache.head_size),
            ("v", grid.value_offset, cache.head_size_v),
        )
    ]


def _content_of(layer: LayerFacts) -> BlockContent | None:
    """Return what a block of the layer's backend holds; None for a backend that is refused or unknown."""
    found = BACKENDS.get(layer.backend)
    return None if found is None else found.content


def _unknown_block(layer: LayerFacts) -> LayoutError:
    found = BACKENDS.get(layer.backend)
    why = f": {found.note}" if found is not None and found.note else ""
    return layer_error(
        layer.name, f"what a block of {layer.backend or 'an unnamed backend'} holds is not known here{why}"
    )


def check_shape(layer: LayerFacts, cache: AttentionFacts, view: TensorView) -> None:
    """Check that a tensor has the axes, heads and content of its spec. Raises LayoutError."""
    content = (cache.head_size + cache.head_size_v) * cache.itemsize
    if len(view.shape) == 4:
        found = (view.shape[1], view.content_bytes)
        wanted = (cache.num_heads, content)
    elif len(view.shape) == 5 and 2 in view.shape[:2] and cache.head_size == cache.head_size_v:
        found = (view.shape[3], view.content_bytes)
        wanted = (cache.num_heads, content // 2)
    else:
        raise layer_error(layer.name, f"a tensor of shape {view.shape} is none that is known here")
    if found != wanted or not view.is_last_axis_contiguous:
        raise layer_error(
            layer.name,
            f"its tensor of shape {view.shape} has {found[0]} heads of {found[1]} bytes, its spec "
            f"{wanted[0]} of {wanted[1]}",
        )


def kernel_block_tokens(view: TensorView) -> int:
    """Return the tokens of one kernel block of a tensor that has passed `check_shape`."""
    return view.shape[2]


def num_kernel_blocks(view: TensorView) -> int:
    """Return how many kernel blocks a tensor has that has passed `check_shape`."""
    if len(view.shape) == 5 and view.shape[0] == 2:
        return view.shape[1]
    return view.shape[0]


def _kv_strides(layer: LayerFacts, cache: AttentionFacts, view: TensorView) -> _KvStrides:
    """Return the strides of a cache in which each token's content is contiguous."""
    if len(view.shape) == 4:
        block, head, token, _ = view.strides
        return _KvStrides(block, head, token, 0, cache.head_size * cache.itemsize)
    if view.shape[0] == view.shape[1] == 2:
        raise layer_error(layer.name, f"of a tensor of shape {view.shape} two axes may be keys and values")
    if view.shape[0] == 2:
        split, block, token, head, _ = view.strides
    else:
        block, split, token, head, _ = view.strides
    return _KvStrides(block, head, token, 0, split)


def _latent_tensors(
    layer: LayerFacts, cache: AttentionFacts, key: LayerKey, view: TensorView, group: GroupName
) -> list[CacheTensor]:
    """Return the tensors of a latent cache: one row a token, the same on every rank."""
    if _content_of(layer) is not BlockContent.LATENT_ROW or len(view.shape) != 4:
        raise _unknown_block(layer)
    return [
        CacheTensor(
            layer=key.layer,
            component=key.component("latent"),
            group=group,
            region=view.region,
            offset=view.offset,
            block_stride=view.strides[0],
            token_stride=view.strides[2],
            unit_stride=0,
            units=(UnitRange(0, 1),),
            chunk_bytes=view.content_bytes,
            itemsize=cache.itemsize,
            dtype=cache.dtype,
            encoding=cache.encoding,
        )
    ]


def _indexer_tensors(
    layer: LayerFacts, cache: AttentionFacts, key: LayerKey, view: TensorView, group: GroupName
) -> list[CacheTensor]:
    """Return the tensors of sparse attention's indexer: in each block all keys, then all scales."""
    row = _INDEXER_KEY_BYTES + _INDEXER_SCALE_BYTES
    is_dense = len(view.shape) == 4 and view.strides[2] == view.content_bytes
    if _content_of(layer) is not BlockContent.INDEXER or not is_dense or view.content_bytes != row:
        raise layer_error(
            layer.name,
            f"an indexer's keys in {layer.backend}, {view.content_bytes} bytes a token, are not known here",
        )
    keys = kernel_block_tokens(view) * _INDEXER_KEY_BYTES
    return [
        CacheTensor(
            layer=key.layer,
            component=key.component(name),
            group=group,
            region=view.region,
            offset=view.offset + offset,
            block_stride=view.strides[0],
            token_stride=size,
            unit_stride=0,
            units=(UnitRange(0, 1),),
            chunk_bytes=size,
            itemsize=itemsize,
            dtype=dtype,
        )
        for name, offset, size, dtype, itemsize in (
            ("indexer.k", 0, _INDEXER_KEY_BYTES, "float8_e4m3fn", 1),
            ("indexer.scale", keys, _INDEXER_SCALE_BYTES, "float32", 4),
        )
    ]


def _cpu_tensors(
    layer: LayerFacts,
    cache: AttentionFacts,
    key: LayerKey,
    view: TensorView,
    group: GroupName,
    heads: UnitRange,
) -> list[CacheTensor]:
    """Return the tensors of CPU attention: a head's page of a block has all keys, then all values, packed."""
    tokens = kernel_block_tokens(view)
    is_dense = len(view.shape) == 4 and view.strides[2] == view.content_bytes
    if not is_dense or cache.head_size != cache.head_size_v:
        raise layer_error(
            layer.name,
            f"CPU attention has a head's block in one piece, keys and values alike, and its tensor has "
            f"shape {view.shape} and strides of {view.strides} bytes",
        )
    if not layer.isa:
        raise layer_error(
            layer.name, "the instruction set for which CPU attention packs its blocks is not known"
        )
    half = tokens * cache.head_size * cache.itemsize
    try:
        packings = (
            ("k", 0, key_packing(layer.isa, tokens, cache.head_size, cache.itemsize)),
            ("v", half, value_packing(layer.isa, tokens, cache.head_size, cache.itemsize)),
        )
    except ValueError as error:
        raise layer_error(layer.name, str(error)) from error
    return [
        _cpu_tensor(cache, key.layer, key.component(name), view, group, heads, offset, packing)
        for name, offset, packing in packings
    ]


def _cpu_tensor(
    cache: AttentionFacts,
    layer: int,
    component: str,
    view: TensorView,
    group: GroupName,
    heads: UnitRange,
    offset: int,
    packing: HalfPacking,
) -> CacheTensor:
    """Return the tensor of CPU attention's keys, or of its values."""
    return CacheTensor(
        layer=layer,
        component=component,
        group=group,
        region=view.region,
        offset=view.offset + offset,
        block_stride=view.strides[0],
        token_stride=packing.item_stride,
        unit_stride=view.strides[1],
        units=(heads,),
        chunk_bytes=packing.chunk_bytes,
        num_chunks=packing.num_chunks,
        chunk_stride=packing.chunk_stride,
        granule_tokens=packing.granule_tokens,
        itemsize=cache.itemsize,
        dtype=cache.dtype,
        encoding=packing.encoding,
    )
