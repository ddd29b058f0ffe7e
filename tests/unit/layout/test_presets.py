"""Presets: who holds which heads and layers, and where the named arrangements put them."""

from __future__ import annotations

import pytest

from kvxferd.ids import EngineId, Generation
from kvxferd.layout import EngineSpec
from kvxferd.layout.presets import attention_layout
from kvxferd.layout.sharding import shard_units, stage_layers


def test_no_units_at_all() -> None:
    """A model without the component."""
    assert shard_units(0, 4, 1) == ()


@pytest.mark.parametrize(
    ("layers", "pp", "want"),
    [
        (80, 4, [(0, 20), (20, 40), (40, 60), (60, 80)]),
        (5, 3, [(0, 2), (2, 4), (4, 5)]),  # the remainder to the first stages
        (1, 2, [(0, 1), (1, 1)]),
    ],
)
def test_layers_of_each_stage(layers: int, pp: int, want: list[tuple[int, int]]) -> None:
    """Even."""
    assert [stage_layers(layers, pp, rank) for rank in range(pp)] == want


def spec() -> EngineSpec:
    """Return a rank that holds 2 of 4 heads."""
    return EngineSpec(EngineId("e"), Generation("g"), 4, pp_size=2, tp_size=2, num_kv_heads=4)


@pytest.mark.parametrize(
    ("layout", "want"),
    [
        # (block, token, unit, second component, second layer), 2 heads of 16 bytes, blocks of 4 of 8
        ("HND", (128, 16, 64, 1024, 2048)),
        ("NHD", (128, 32, 16, 1024, 2048)),
        ("HND-blocks-first", (256, 16, 64, 128, 2048)),
        ("NHD-blocks-first", (256, 32, 16, 128, 2048)),
        ("HND-cross-layer", (512, 16, 64, 128, 256)),
        ("NHD-cross-layer", (512, 32, 16, 128, 256)),
        ("HND-packed", (256, 32, 128, 16, 2048)),
        ("NHD-packed", (256, 64, 32, 16, 2048)),
        ("LBHNC", (256, 32, 128, 16, 2048)),
        ("LBNHC", (256, 64, 32, 16, 2048)),
        ("BLHNC", (512, 32, 128, 16, 256)),
        ("BLNHC", (512, 64, 32, 16, 256)),
        ("BHLNC", (512, 32, 256, 16, 128)),
        ("LHBNC", (128, 32, 1024, 16, 2048)),
    ],
)
def test_strides_of_each_arrangement(layout: str, want: tuple[int, ...]) -> None:
    """By hand."""
    made = attention_layout(
        spec=spec(), num_kv_heads=4, head_dim=8, block_tokens=4, num_blocks=8, layout=layout
    )
    k, v, next_k, _ = made.tensors
    assert (k.block_stride, k.token_stride, k.unit_stride, v.offset, next_k.offset) == want
    assert made.regions[0].size_bytes == 4096


def test_vectorised_keys_are_chunks_of_16_bytes_and_values_single_items() -> None:
    """Heads of 16 numbers of 2 bytes, blocks of 4 tokens. A head of no whole number of chunks is refused."""
    sizes = {"spec": spec(), "num_kv_heads": 4, "block_tokens": 4, "num_blocks": 8, "layout": "vectorised"}
    k, v, *_ = attention_layout(head_dim=16, **sizes).tensors  # type: ignore[arg-type]
    assert (k.chunk_bytes, k.num_chunks, k.token_stride, k.chunk_stride) == (16, 2, 16, 64)
    assert (v.chunk_bytes, v.num_chunks, v.token_stride, v.chunk_stride) == (2, 16, 2, 8)
    with pytest.raises(ValueError, match="no whole number of 16"):
        attention_layout(head_dim=12, **sizes)  # type: ignore[arg-type]
