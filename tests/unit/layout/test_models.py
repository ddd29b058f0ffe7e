"""Models by name: what they cache, against arithmetic from their published configurations."""

from __future__ import annotations

import pytest

from kvxferd.layout import GroupKind, RankLayout, UnitRange
from kvxferd.layout.presets import MODELS, deploy, find_model, with_kv_dtype
from kvxferd.layout.validate import validate_layout
from kvxferd.plan import check_engine


def token_bytes(layout: RankLayout) -> int:
    """Return what one token takes in all layers of a rank."""
    groups = {group.name: group for group in layout.groups}
    return sum(
        t.num_units * t.content_bytes // t.granule_tokens
        for t in layout.tensors
        if groups[t.group].kind is GroupKind.ATTENTION
    )


def test_a_block_has_whole_items() -> None:
    ((_, layout),) = deploy("deepseek-v4", block_tokens=24).values()
    assert {group.name: group.block_tokens for group in layout.groups} == {
        "sliding": 24,
        "full": 384,
        "compressor.4": 4,
        "compressor.128": 8,
    }


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", ["NHD+SD", "blocks-first", "packed", "HND"])
def test_every_model_in_a_real_deployment(name: str, layout: str) -> None:
    """Valid, complete, at TP that does not divide and beyond the heads."""
    for tp, pp in ((3, 2), (16, 1)):
        ranks = deploy(name, tp=tp, pp=pp, layout=layout, num_blocks=64)
        for spec, made in ranks.values():
            validate_layout(spec, made)
        check_engine(ranks)


def test_groups_beyond_tp_are_replicated() -> None:
    """Eight B and C groups on sixteen ranks; the heads are divided all the same."""
    ranks = deploy("nemotron-h-8b", tp=16)
    held = {rank.tp_rank: {t.component: t.units for t in made.tensors} for rank, (_, made) in ranks.items()}
    assert [held[r]["conv.B"] for r in (0, 1, 15)] == [(UnitRange(0, 128),)] * 2 + [(UnitRange(896, 1024),)]
    assert held[15]["ssm"] == (UnitRange(120, 128),)


def test_the_indexers_scales_lie_behind_its_keys_in_each_block() -> None:
    """A page of 16 tokens: 16 x 128 bytes of keys, then 16 x 4 of scales."""
    ((_, layout),) = deploy("deepseek-v3.2", block_tokens=16).values()
    key, scale = (
        next(t for t in layout.tensors if t.component == name) for name in ("indexer.k", "indexer.scale")
    )
    assert (key.block_stride, key.token_stride, key.chunk_bytes) == (16 * 132, 128, 128)
    assert (scale.offset - key.offset, scale.block_stride, scale.token_stride) == (16 * 128, 16 * 132, 4)


def test_another_dtype() -> None:
    """Keys and values change, states do not."""
    model = with_kv_dtype(find_model("nemotron-h-8b"), "float8_e4m3fn", 1)
    ((_, layout),) = deploy(model).values()
    assert token_bytes(layout) == 4 * 2 * 8 * 128
    assert {t.dtype for t in layout.tensors if t.component == "k"} == {"float8_e4m3fn"}
    assert {t.dtype for t in layout.tensors if t.component == "ssm"} == {"bfloat16"}


def test_an_unknown_model_is_refused_with_the_names() -> None:
    """And families are found in any case."""
    assert find_model("Gemma-3").name == "gemma-3-27b"
    with pytest.raises(ValueError, match=r"'llama-4'.*llama-3-70b"):
        find_model("llama-4")
