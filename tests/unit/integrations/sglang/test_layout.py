"""Pools that are described, from objects that look as SGLang's do; and those that are refused, by name.

tests/proofs/sglang/test_pools.py has SGLang's own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvxferd.errors import LayoutError
from kvxferd.integrations.sglang.layout.pools import aux_tensors
from kvxferd.integrations.sglang.layout.support import POOLS, describe
from kvxferd.layout import EngineSpec, RankLayout, from_tensors

PAGE, PAGES, HEADS, WIDTH, LAYERS = 4, 6, 2, 8, 3


class _Pool:
    """The attributes that describers read."""

    size, page_size, start_layer, layer_num = (PAGES - 1) * PAGE, PAGE, 0, LAYERS
    dtype = store_dtype = torch.bfloat16
    kv_cache_layout, is_quantized_kv_cache, quant_method = "nhd", False, None
    model_layer_ids = tuple(range(LAYERS))

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class MHATokenToKVPool(_Pool):
    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        is_page_first = self.kv_cache_layout == "hnd"
        shape = (PAGES, HEADS, PAGE, WIDTH) if is_page_first else (PAGES * PAGE, HEADS, WIDTH)
        self.k_buffer = [torch.zeros(shape, dtype=self.store_dtype) for _ in self.model_layer_ids]
        self.v_buffer = [torch.zeros(shape, dtype=self.store_dtype) for _ in self.model_layer_ids]


class MLATokenToKVPool(_Pool):
    kv_scale_buffer, use_dsa = None, False

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        rows = (PAGES * PAGE, 1, WIDTH)
        self.kv_buffer = [torch.zeros(rows, dtype=self.store_dtype) for _ in self.model_layer_ids]


class SWAKVPool(_Pool):
    def __init__(self, full: Any, window: Any) -> None:
        super().__init__(full_kv_pool=full, swa_kv_pool=window)


def layout_of(pool: Any, window_tokens: int | None = None) -> RankLayout:
    described = describe(pool, window_tokens)
    rows, aux = aux_tensors({"output_ids": torch.zeros(3, 16, dtype=torch.int32)}, LAYERS - 1)
    spec = EngineSpec("e", "g", LAYERS, num_kv_heads=HEADS)
    return from_tensors(spec, {**described.tensors, **rows}, [*described.groups, aux], described.layers)


@pytest.mark.parametrize(
    ("kv_cache_layout", "token_stride", "unit_stride"),
    [("nhd", HEADS * WIDTH * 2, WIDTH * 2), ("hnd", WIDTH * 2, PAGE * WIDTH * 2)],
)
def test_keys_and_values(kv_cache_layout: str, token_stride: int, unit_stride: int) -> None:
    layout = layout_of(MHATokenToKVPool(kv_cache_layout=kv_cache_layout))
    assert [(group.name, group.num_blocks, group.block_tokens) for group in layout.groups] == [
        ("full", PAGES, PAGE),
        ("aux", 3, 0),
    ]
    keys = [tensor for tensor in layout.tensors if tensor.component in "kv"]
    assert [(tensor.layer, tensor.component) for tensor in keys] == [
        (layer, component) for layer in range(LAYERS) for component in "kv"
    ]
    assert {tensor.token_stride for tensor in keys} == {token_stride}
    assert {tensor.unit_stride for tensor in keys} == {unit_stride}
    assert {tensor.block_stride for tensor in keys} == {PAGE * HEADS * WIDTH * 2}


def test_latents_and_eight_bit_floats() -> None:
    pool = MLATokenToKVPool(dtype=torch.float8_e4m3fn, store_dtype=torch.uint8)
    latents = [tensor for tensor in layout_of(pool).tensors if tensor.component == "latent"]
    assert {(one.chunk_bytes, one.token_stride, one.encoding) for one in latents} == {
        (WIDTH, WIDTH, "float8_e4m3fn")
    }


def test_windows_are_a_group_of_their_own() -> None:
    pool = SWAKVPool(
        MHATokenToKVPool(model_layer_ids=(0, 2), layer_num=2),
        MHATokenToKVPool(model_layer_ids=(1,), layer_num=1),
    )
    layout = layout_of(pool, 10)
    assert {(one.layer, one.group) for one in layout.tensors} == {
        (0, "full"), (1, "window"), (2, "full"), (2, "aux")
    }  # fmt: skip
    assert {group.name: group.sliding_window for group in layout.groups}["window"] == 10
    assert describe(pool, 10).states == {"swa": "window"}


@pytest.mark.parametrize(
    ("pool", "why"),
    [
        (MHATokenToKVPool(is_quantized_kv_cache=True), "quantised"),
        (MHATokenToKVPool(kv_cache_layout="vectorized_5d"), "its layout is vectorized_5d"),
        (MLATokenToKVPool(use_dsa=True), "an indexer"),
        (SWAKVPool(MLATokenToKVPool(), MHATokenToKVPool()), "its part MLATokenToKVPool"),
        (type("SomePool", (MHATokenToKVPool,), {})(), "SomePool: it is not known"),
        *((type(name, (), {})(), one.note) for name, one in POOLS.items() if one.describer is None),
    ],
)
def test_what_is_not_described_is_refused_by_name(pool: Any, why: str) -> None:
    with pytest.raises(LayoutError) as refused:
        describe(pool, None)
    assert type(pool).__name__ in refused.value.message
    assert why in refused.value.message
    assert "sglang-support.md" in refused.value.message
