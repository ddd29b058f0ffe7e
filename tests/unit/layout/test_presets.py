"""Presets: who holds which heads and layers, where arrangements put them, and what no engine could be."""

from __future__ import annotations

from typing import Any

import pytest

from kvxferd.ids import Rank
from kvxferd.layout import EngineSpec, RankLayout, UnitRange
from kvxferd.layout.presets import MODELS, attention_layout, deploy, find_model, with_kv_dtype
from kvxferd.layout.sharding import shard_units, stage_layers
from kvxferd.layout.validate import validate_layout
from kvxferd.plan import check_engine

Engine = dict[Rank, tuple[EngineSpec, RankLayout]]


def engine(name: str, **chosen: Any) -> Engine:
    """Return every rank of a deployment of small blocks, valid and complete."""
    ranks = deploy(name, **({"block_tokens": 4, "num_blocks": 14} | chosen))
    for spec, layout in ranks.values():
        validate_layout(spec, layout)
    check_engine(ranks)
    return ranks


@pytest.mark.parametrize(
    ("layers", "pp", "want"),
    [
        (80, 4, [(0, 20), (20, 40), (40, 60), (60, 80)]),
        (5, 3, [(0, 2), (2, 4), (4, 5)]),  # the remainder to the first stages
        (1, 2, [(0, 1), (1, 1)]),
    ],
)
def test_layers_of_each_stage(layers: int, pp: int, want: list[tuple[int, int]]) -> None:
    assert [stage_layers(layers, pp, rank) for rank in range(pp)] == want


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
    spec = EngineSpec("e", "g", 4, pp_size=2, tp_size=2, num_kv_heads=4)
    made = attention_layout(
        spec=spec, num_kv_heads=4, head_dim=8, block_tokens=4, num_blocks=8, layout=layout
    )
    k, v, next_k, _ = made.tensors
    assert (k.block_stride, k.token_stride, k.unit_stride, v.offset, next_k.offset) == want
    assert made.regions[0].size_bytes == 4096


def test_vectorised_keys_are_chunks_of_16_bytes_and_values_single_items() -> None:
    """Heads of 16 numbers of 2 bytes, blocks of 4 tokens. A head of no whole number of chunks is refused."""
    spec = EngineSpec("e", "g", 1, num_kv_heads=2)
    sizes: dict[str, Any] = {"spec": spec, "num_kv_heads": 2, "block_tokens": 4, "num_blocks": 8}
    k, v = attention_layout(head_dim=16, layout="vectorised", **sizes).tensors
    assert (k.chunk_bytes, k.num_chunks, k.token_stride, k.chunk_stride) == (16, 2, 16, 64)
    assert (v.chunk_bytes, v.num_chunks, v.token_stride, v.chunk_stride) == (2, 16, 2, 8)
    with pytest.raises(ValueError, match="no whole number of 16"):
        attention_layout(head_dim=12, layout="vectorised", **sizes)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", ["NHD+SD", "HND-blocks-first", "HND-packed", "HND"])
def test_every_model_in_a_real_deployment(name: str, layout: str) -> None:
    """Valid, complete, at TP that does not divide and beyond the heads."""
    for tp, pp in ((3, 2), (16, 1)):
        engine(name, tp=tp, pp=pp, layout=layout, block_tokens=16, num_blocks=64)


def test_a_block_has_whole_items() -> None:
    ((_, layout),) = deploy("deepseek-v4", block_tokens=24).values()
    assert {group.name: group.block_tokens for group in layout.groups} == {
        "sliding": 24,
        "full": 384,
        "compressor.4": 4,
        "compressor.128": 8,
    }


def test_groups_beyond_tp_are_replicated() -> None:
    """Eight B and C groups on sixteen ranks; the heads are divided all the same."""
    assert shard_units(0, 4, 1) == ()
    ranks = deploy("nemotron-h-8b", tp=16)
    held = {rank.tp_rank: {t.component: t.units for t in made.tensors} for rank, (_, made) in ranks.items()}
    assert [held[r]["conv.B"] for r in (0, 1, 15)] == [(UnitRange(0, 128),)] * 2 + [(UnitRange(896, 1024),)]
    assert held[15]["ssm"] == (UnitRange(120, 128),)


def test_another_dtype() -> None:
    """Keys and values change, states do not."""
    model = with_kv_dtype(find_model("nemotron-h-8b"), "float8_e4m3fn", 1)
    ((_, layout),) = deploy(model).values()
    found = {t.component: (t.dtype, t.num_units * t.content_bytes) for t in layout.tensors}
    assert found["k"] == found["v"] == ("float8_e4m3fn", 8 * 128)
    assert found["ssm"][0] == "bfloat16"


def test_an_unknown_model_is_refused_with_the_names() -> None:
    """And families are found in any case."""
    assert find_model("Gemma-3").name == "gemma-3-27b"
    with pytest.raises(ValueError, match=r"'llama-4'.*llama-3-70b"):
        find_model("llama-4")


@pytest.mark.parametrize(
    ("stages", "ends"), [((3, 1), [3, 4]), ((1, 0, 3), [1, 1, 4])], ids=["uneven", "one that is empty"]
)
def test_stages_have_the_layers_that_they_are_given(stages: tuple[int, ...], ends: list[int]) -> None:
    made = engine("tiny-dense", pp=len(stages), stages=stages)
    assert [layout.end_layer for _, layout in made.values()] == ends


@pytest.mark.parametrize(
    ("name", "chosen", "words"),
    [
        ("tiny-dense", {"layout": "DNH"}, "'DNH'"),
        ("tiny-dense", {"layout": "HND+XS"}, r"behind the \+"),
        ("tiny-dense", {"tp": 0}, "tp 0"),
        ("tiny-dense", {"num_blocks": 0}, "num_blocks 0"),
        ("tiny-dense", {"pp": 2, "stages": (1, 2, 1)}, "3 stages: pp is 2"),
        ("tiny-dense", {"pp": 2, "stages": (1, 2)}, "the model has 4"),
        ("tiny-dense", {"cp": 2, "interleave": 3}, "interleave 3"),
        ("tiny-sliding", {"num_blocks": {"full": 9}}, "lacks group 'sliding'"),
        ("tiny-gdn", {"num_blocks": {"full": 9, "state.0": 2, "state.1": 2}}, "share their pages"),
        # K and V of one layer share a page with its states
        *(("tiny-gdn", {"layout": one}, "shared pages") for one in ("HND-cross-layer", "BLHNC", "LHBNC")),
        ("tiny-gdn", {"layout": "vectorised"}, "shared pages"),
    ],
)
def test_what_no_engine_could_be(name: str, chosen: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine(name, **chosen)
