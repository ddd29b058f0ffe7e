"""Opaque pages: blocks that move as they are, because what they hold is not described here.

Nothing of a page is known but its size, so it goes only to a page of an engine that writes the same. The
tensor's `encoding` has everything by which engines can be told apart, and the planner refuses a pair whose
encodings differ and shows both. The unit of a page is the rank that holds it.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvxferd.ids import GroupName
from kvxferd.integrations.vllm.layout.attention import kernel_block_tokens
from kvxferd.integrations.vllm.layout.facts import (
    AttentionFacts,
    CacheGroup,
    CacheKind,
    LayerFacts,
    LayerKey,
    WorkerFacts,
    layer_error,
)
from kvxferd.integrations.vllm.layout.support import SUPPORT_PAGE
from kvxferd.layout import CacheTensor, UnitRange
from kvxferd.layout.tensor_views import TensorView

_MARK = "opaque: "


def is_opaque(tensor: CacheTensor) -> bool:
    """Whether a cache tensor is of opaque pages."""
    return tensor.encoding.startswith(_MARK)


def opaque_report(layers: Mapping[str, int], vllm_version: str, device: str) -> str:
    """Return the sentence for an engine's log. `layers`: how many have opaque pages, by backend or mixer."""
    names = ", ".join(f"{count} layers of {name}" for name, count in layers.items())
    return (
        f"caches of {names} move as opaque pages: only to an engine with the same tensor_parallel_size, "
        f"block size, order of axes, dtype, device ({device}) and vLLM version ({vllm_version}; "
        f"see {SUPPORT_PAGE})"
    )


def opaque_encoding(what: str, layer: LayerFacts, worker: WorkerFacts) -> str:
    """Return the identity of a layer's opaque pages: `what`, and all else by which engines can be told apart.

    Raises LayoutError, naming the fact, for one that could not be read.
    """
    needed = {
        "the device that writes them has no name": worker.device,
        "the dtype of its cache has no name": layer.cache_dtype,
        "their backend has no class in vLLM or in an installed distribution": layer.implementation,
        'vLLM has no version ("dev"): set opaque_cache_version': worker.vllm_version,
    }
    for why, fact in needed.items():
        if not fact:
            raise layer_error(layer.name, f"its pages are opaque, and {why} (see {SUPPORT_PAGE})")
    device = " ".join(filter(None, (worker.device, layer.isa, "mx scales" if layer.has_mx_scales else "")))
    return (
        f"{_MARK}{what}, cache dtype {layer.cache_dtype}, tp {worker.tp_size}, {layer.implementation}, "
        f"{device}, vllm {worker.vllm_version}"
    )


def opaque_units(worker: WorkerFacts) -> tuple[UnitRange, ...]:
    """Return the units of this rank's opaque pages."""
    return (UnitRange(worker.tp_rank, worker.tp_rank + 1),)


def opaque_page(
    layer: LayerFacts,
    cache: AttentionFacts,
    key: LayerKey,
    view: TensorView,
    group: CacheGroup,
    name: GroupName,
    worker: WorkerFacts,
) -> CacheTensor:
    """Return the tensor of an attention layer's pages, or of its ring. A kernel block is one item.

    Raises LayoutError for a view whose kernel block is in too many pieces.
    """
    if group.shard_count > 1:
        raise layer_error(
            layer.name,
            f"decode_context_parallel_size is {group.shard_count}, and which tokens a block of "
            f"{layer.backend} holds is not known here",
        )
    block, *strides, _ = view.strides
    # The outer of slots and states first; a page's bytes are compared in this order.
    axes = sorted(zip("HN", view.shape[1:3], strides, strict=True), key=lambda axis: -axis[2])
    axes = [axis for axis in axes if axis[1] > 1]
    order = "".join(axis for axis, _, _ in axes) + "C"
    chunk = view.content_bytes
    while axes and axes[-1][2] == chunk:
        chunk *= axes.pop()[1]
    if len(axes) > 1:
        raise layer_error(layer.name, f"a block of shape {view.shape[1:]} lies in pieces of {chunk} bytes")
    _, num_chunks, chunk_stride = axes[0] if axes else ("", 1, 0)
    is_ring = group.kind is CacheKind.STATE
    shape = f"{order} of {view.shape[1]} x {view.shape[2]} x {view.content_bytes} bytes"
    return CacheTensor(
        layer=key.layer,
        component=key.component("page"),
        group=name,
        region=view.region,
        offset=view.offset,
        block_stride=block,
        token_stride=0,
        unit_stride=0,
        units=opaque_units(worker),
        chunk_bytes=chunk,
        num_chunks=num_chunks,
        chunk_stride=chunk_stride,
        granule_tokens=1 if is_ring else kernel_block_tokens(cache, view),
        itemsize=cache.itemsize,
        dtype=cache.dtype,
        encoding=opaque_encoding(
            f"{layer.backend}, {cache.encoding or 'plain'}, {shape}, blocks of {group.block_tokens} tokens",
            layer,
            worker,
        ),
    )
