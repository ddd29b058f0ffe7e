"""Presets: who holds which heads and layers, and where the named arrangements put them."""

from __future__ import annotations

import pytest

from kvxferd.ids import EngineId, Generation
from kvxferd.layout import EngineSpec, UnitRange
from kvxferd.layout.presets import attention_layout
from kvxferd.layout.sharding import shard_units, stage_layers


@pytest.mark.parametrize(
    ("heads", "tp", "want"),
    [
        (8, 2, [(0, 4), (4, 8)]),
        (8, 3, [(0, 3), (3, 6), (6, 8)]),  # larger shares first
        (4, 4, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),  # beyond the heads: r*K//TP
        (3, 4, [(0, 1), (0, 1), (1, 2), (2, 3)]),
    ],
)
def test_units_of_each_rank(heads: int, tp: int, want: list[tuple[int, int]]) -> None:
    """Balanced, or replicated."""
    assert [shard_units(heads, tp, rank) for rank in range(tp)] == [(UnitRange(a, b),) for a, b in want]


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


def spec(pp_rank: int = 0) -> EngineSpec:
    """Return a rank that holds 2 of 4 heads."""
    return EngineSpec(
        EngineId("e"), Generation("g"), 4, pp_size=2, tp_size=2, pp_rank=pp_rank, num_kv_heads=4
    )


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


def test_a_stage_may_be_given() -> None:
    """Stages that the engine divided otherwise."""
    made = attention_layout(
        spec=spec(1), num_kv_heads=4, head_dim=8, block_tokens=4, num_blocks=8, start_layer=1, end_layer=4
    )
    assert (made.start_layer, made.end_layer) == (1, 4)
    assert sorted({tensor.layer for tensor in made.tensors}) == [1, 2, 3]


def test_an_unknown_name_is_refused() -> None:
    """With the names there are."""
    with pytest.raises(ValueError, match=r"'DNH'.*HND, NHD"):
        attention_layout(spec=spec(), num_kv_heads=4, head_dim=8, block_tokens=4, num_blocks=8, layout="DNH")
