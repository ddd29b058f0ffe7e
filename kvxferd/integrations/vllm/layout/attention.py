"""Attention caches: cache tensors from the tensor that vLLM makes for a layer.

vLLM makes one tensor [blocks, slots, states, content] a layer, whatever the order in memory (LBHNC, LBNHC,
LHBNC, BLHNC, BLNHC, BHLNC: its strides). A slot is a head's, mostly, and a state stands for one token, or for
several that were compressed into it. Several caches of a layer may lie in one page, one behind another. The
attention backend decides what the content is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvxferd.ids import GroupName
from kvxferd.integrations.vllm.layout.cpu_attention import ContentPacking, key_packing, value_packing
from kvxferd.integrations.vllm.layout.facts import AttentionFacts, LayerFacts, LayerKey, layer_error
from kvxferd.integrations.vllm.layout.support import (
    BACKENDS,
    ROW_COMPONENTS,
    ROW_DTYPES,
    TOKEN_SCALES_BACKEND,
    BlockContent,
)
from kvxferd.layout import CacheTensor, UnitRange
from kvxferd.layout.tensor_views import TensorView

_INDEXER_SCALE_BYTES = 4  # a float32, or four powers of two, for each row
_FP8_KEY_BYTES = 128
_MXFP4_KEY_BYTES = 64  # 128 values
# DeepSeek V4's record of a token: 448 fp8 and 64 bfloat16 values, then 7 scales and a byte of padding. V4.1's
# records, of 528 and 288 bytes, have each token's scales behind its own values.
_V4_VALUE_BYTES = 576
_V4_SCALE_BYTES = 8
_TOKEN_SCALE_BYTES = 4  # a float32 behind the values of each head's key, and of its value


class _Part(NamedTuple):
    """A range of the content of one slot and state."""

    component: str
    num_bytes: int
    dtype: str
    itemsize: int = 1
    encoding: str = ""


class _Packing(NamedTuple):
    """How a kernel block holds the content of its states."""

    parts: tuple[_Part, ...]  # in the order in which they lie
    is_by_part: bool = False  # a slot has all states' first part, and then all their second one


class _PlacedPart(NamedTuple):
    """A part, and where it lies in a slot of a kernel block."""

    part: _Part
    offset: int
    packing: ContentPacking


def is_described(layer: LayerFacts, cache: AttentionFacts) -> bool:
    """Whether it is known what a block of the layer holds."""
    if layer.is_plugin_dtype:
        return False
    return _is_packed_for_cpu(layer, cache) or _packing_of(layer, cache) is not None


def attention_tensors(
    layer: LayerFacts,
    cache: AttentionFacts,
    key: LayerKey,
    view: TensorView,
    group: GroupName,
    heads: UnitRange,
) -> list[CacheTensor]:
    """Return one layer's cache tensors, for a view that has passed `check_shape` and `is_described`.

    Raises LayoutError, naming the layer, for sizes or strides that its packing cannot have.
    """
    place = _place_cpu_parts if _is_packed_for_cpu(layer, cache) else _place_parts
    block, slot, _, _ = view.strides
    return [
        CacheTensor(
            layer=key.layer,
            component=key.component(part.component),
            group=group,
            region=view.region,
            offset=view.offset + offset,
            block_stride=block,
            token_stride=packing.item_stride,
            unit_stride=slot if heads.stop - heads.start > 1 else 0,
            units=(heads,),
            chunk_bytes=packing.chunk_bytes,
            num_chunks=packing.num_chunks,
            chunk_stride=packing.chunk_stride,
            granule_tokens=packing.granule_tokens,
            itemsize=part.itemsize,
            dtype=part.dtype,
            encoding=packing.encoding,
        )
        for part, offset, packing in place(layer, cache, view)
    ]


def _place_parts(layer: LayerFacts, cache: AttentionFacts, view: TensorView) -> Iterator[_PlacedPart]:
    """Yield the parts of a state's content, which lie together or all states' of one kind together."""
    packing = _packing_of(layer, cache)
    assert packing is not None
    state = view.strides[2]
    if packing.is_by_part and state != view.content_bytes:
        raise layer_error(layer.name, f"its states of {view.content_bytes} bytes are {state} bytes apart")
    start = 0  # of a part, in a state's content
    for part in packing.parts:
        offset = start * (view.shape[2] if packing.is_by_part else 1)
        stride = part.num_bytes if packing.is_by_part else state
        content = ContentPacking(cache.tokens_per_state, stride, part.num_bytes, 1, 0, part.encoding)
        yield _PlacedPart(part, offset, content)
        start += part.num_bytes


def _place_cpu_parts(layer: LayerFacts, cache: AttentionFacts, view: TensorView) -> Iterator[_PlacedPart]:
    """Yield the halves of CPU attention: a head's page of a block has all keys, then all values, packed."""
    tokens = kernel_block_tokens(cache, view)
    is_dense = view.strides[2] == view.content_bytes
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
    for name, offset, pack in (("k", 0, key_packing), ("v", half, value_packing)):
        try:
            packing = pack(layer.isa, tokens, cache.head_size, cache.itemsize)
        except ValueError as error:
            raise layer_error(layer.name, str(error)) from error
        yield _PlacedPart(_Part(name, half, cache.dtype, cache.itemsize), offset, packing)


def ring_tensor(
    layer: LayerFacts, cache: AttentionFacts, key: LayerKey, view: TensorView, group: GroupName
) -> CacheTensor | None:
    """Return the tensor of a ring, of which a request has one block; None where it is not described here.

    Token t is in row t % rows. So a ring moves whole, as a state that stands at one token, to a ring of as
    many rows.
    """
    is_row = BACKENDS.get(layer.backend) is BlockContent.LATENT_ROW
    if not is_row or cache.encoding or layer.is_plugin_dtype:
        return None
    num_slots, rows = view.shape[1:3]
    return CacheTensor(
        layer=key.layer,
        component=key.component("ring"),
        group=group,
        region=view.region,
        offset=view.offset,
        block_stride=view.strides[0],
        token_stride=0,
        unit_stride=view.strides[1] if num_slots > 1 else 0,
        units=(UnitRange(0, num_slots),),
        chunk_bytes=view.content_bytes,
        num_chunks=rows,
        chunk_stride=view.strides[2] if rows > 1 else 0,
        itemsize=cache.itemsize,
        dtype=cache.dtype,
        encoding=f"ring of {rows}",
    )


def _packing_of(layer: LayerFacts, cache: AttentionFacts) -> _Packing | None:
    """Return how the backend packs a kernel block; None where that is not described."""
    content = BACKENDS.get(layer.backend)
    if content is BlockContent.KEY_THEN_VALUE:
        return _key_then_value(layer, cache)
    if cache.head_size_v or cache.num_slots != 1:
        return None
    name = ROW_COMPONENTS.get(layer.backend, "latent")
    row = _Part(name, cache.content_bytes, cache.dtype, cache.itemsize, cache.encoding)
    match content:
        case BlockContent.LATENT_ROW:
            return _Packing((row,))
        case BlockContent.DEEPSEEK_RECORD:
            if cache.encoding in ROW_DTYPES and row.num_bytes == _V4_VALUE_BYTES + _V4_SCALE_BYTES:
                values = row._replace(num_bytes=_V4_VALUE_BYTES)
                scales = _Part(f"{name}.scale", _V4_SCALE_BYTES, "uint8", encoding=cache.encoding)
                return _Packing((values, scales), is_by_part=True)
            return _Packing((row,))
        case BlockContent.INDEXER:
            return _indexer(layer, row.num_bytes - _INDEXER_SCALE_BYTES)
    return None


def _is_packed_for_cpu(layer: LayerFacts, cache: AttentionFacts) -> bool:
    """Whether the layer's blocks are of vLLM's CPU attention."""
    is_plain = _is_plain(cache) and cache.tokens_per_state == 1
    return is_plain and BACKENDS.get(layer.backend) is BlockContent.CPU_PACKED


def _is_plain(cache: AttentionFacts) -> bool:
    """Whether a cache has a slot for each head, with the elements of its key and value alone."""
    return (
        cache.head_size_v > 0
        and not cache.encoding
        and cache.num_slots == cache.num_heads
        and cache.content_bytes == cache.element_bytes
    )


def _key_then_value(layer: LayerFacts, cache: AttentionFacts) -> _Packing | None:
    """Return the packing of each head's key and value, or of both with a scale behind each."""
    if _is_plain(cache):
        sizes = cache.head_size * cache.itemsize, cache.head_size_v * cache.itemsize
    else:
        elements = cache.element_bytes // (2 if cache.encoding == "int4_per_token_head" else 1)
        has_scales = (
            layer.backend == TOKEN_SCALES_BACKEND
            and cache.encoding.endswith("_per_token_head")
            and cache.head_size == cache.head_size_v > 0
            and cache.num_slots == cache.num_heads
            and cache.content_bytes == elements + 2 * _TOKEN_SCALE_BYTES
        )
        if not has_scales:
            return None
        sizes = (cache.content_bytes // 2,) * 2
    parts = (
        _Part(name, size, cache.dtype, cache.itemsize, cache.encoding)
        for name, size in zip("kv", sizes, strict=True)
    )
    return _Packing(tuple(parts))


def _indexer(layer: LayerFacts, key_bytes: int) -> _Packing | None:
    """Return the packing of a sparse attention's indexer, with keys of so many bytes."""
    if key_bytes == _FP8_KEY_BYTES:
        keys = _Part("indexer.k", key_bytes, "float8_e4m3fn")
        scales = _Part("indexer.scale", _INDEXER_SCALE_BYTES, "float32", 4)
        if layer.has_mx_scales:
            scales = scales._replace(dtype="uint8", itemsize=1, encoding="ue8m0")
    elif key_bytes == _MXFP4_KEY_BYTES:
        keys = _Part("indexer.k", key_bytes, "uint8", encoding="mxfp4")
        scales = _Part("indexer.scale", _INDEXER_SCALE_BYTES, "uint8", encoding="ue8m0")
    else:
        return None
    return _Packing((keys, scales), is_by_part=True)


def check_shape(layer: LayerFacts, cache: AttentionFacts, view: TensorView) -> None:
    """Check that a tensor has the axes, slots and content of its spec. Raises LayoutError."""
    if len(view.shape) != 4:
        raise layer_error(layer.name, f"a tensor of shape {view.shape} is none that is known here")
    found = (view.shape[1], view.content_bytes)
    wanted = (cache.num_slots, cache.content_bytes)
    if found != wanted or not view.is_last_axis_contiguous:
        raise layer_error(
            layer.name,
            f"its tensor of shape {view.shape} has {found[0]} heads of {found[1]} bytes, its spec "
            f"{wanted[0]} of {wanted[1]}",
        )


def kernel_block_tokens(cache: AttentionFacts, view: TensorView) -> int:
    """Return the tokens of one kernel block of a tensor that has passed `check_shape`."""
    return view.shape[2] * cache.tokens_per_state
