"""Asks vLLM itself, in its own interpreter, what it makes; prints JSON. See `test_real_vllm.py`.

python real_vllm.py views
python real_vllm.py packing ISA BLOCK_TOKENS
"""

from __future__ import annotations

import json
import sys

import torch

NUM_LAYERS, NUM_BLOCKS, NUM_HEADS, HEAD_SIZE = 3, 4, 2, 32


def views() -> dict[str, object]:
    """Shape, strides and offset of every layer's tensor, in every layout, whole and in kernel blocks."""
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheTensor,
        compute_layout_strides,
        create_kv_cache_views,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout

    spec = FullAttentionSpec(block_size=32, num_kv_heads=NUM_HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16)
    page = spec.page_size_bytes
    names = [f"layer.{number}" for number in range(NUM_LAYERS)]
    found: dict[str, object] = {}
    for layout in KVCacheLayout:
        for kernel in (32, 16):
            if kernel < 32 and layout.name not in ("LBHNC", "LBNHC"):
                continue  # vLLM splits only dense pages
            layer_stride, block_stride, *_ = compute_layout_strides(spec, NUM_BLOCKS, NUM_LAYERS, layout)
            raw = torch.zeros(page * NUM_BLOCKS * NUM_LAYERS, dtype=torch.int8)
            placed = KVCacheTensor(raw.nbytes, names, layer_stride, block_stride)
            made = create_kv_cache_views(raw, spec, NUM_BLOCKS, layout, placed, kernel)
            found[f"{layout.name}/{kernel}"] = [
                [list(view.shape), list(view.stride()), view.storage_offset()] for view in made
            ]
    return found


def packing(isa: str, block_tokens: int) -> dict[str, object]:
    """The bytes of a cache after vLLM's own kernel wrote known keys and values into two of its blocks."""
    from vllm import _custom_ops as ops

    tokens = block_tokens + block_tokens // 2 + 1
    numbers = torch.arange(2 * tokens * NUM_HEADS * HEAD_SIZE, dtype=torch.int32).view(
        2, tokens, NUM_HEADS, HEAD_SIZE
    )
    bits = (numbers % 30000 + 1).to(torch.int16)  # no bit pattern of these is NaN in bfloat16
    key, value = bits.view(torch.bfloat16).unbind(0)
    cache = torch.zeros(NUM_BLOCKS, NUM_HEADS, block_tokens, 2 * HEAD_SIZE, dtype=torch.bfloat16)
    halves = cache.view(NUM_BLOCKS, NUM_HEADS, 2 * block_tokens, HEAD_SIZE)
    key_cache, value_cache = halves.chunk(2, dim=2)
    ids = torch.tensor([2, 1])
    at = torch.arange(tokens)
    slots = ids[at // block_tokens] * block_tokens + at % block_tokens
    ops.cpu_attn_reshape_and_cache(
        key.contiguous(),
        value.contiguous(),
        key_cache,
        value_cache,
        slots,
        isa,
        k_scale=1.0,
        v_scale=1.0,
        kv_cache_dtype="auto",
    )
    return {"tokens": tokens, "cache": cache.view(torch.int16).flatten().tolist()}


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    answer = views() if what == "views" else packing(rest[0], int(rest[1]))
    print("ANSWER " + json.dumps(answer))
