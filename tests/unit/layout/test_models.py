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


def state_bytes(layout: RankLayout) -> int:
    """Return what one request's state takes in all layers of a rank."""
    groups = {group.name: group for group in layout.groups}
    return sum(
        t.num_units * t.content_bytes for t in layout.tensors if groups[t.group].kind is GroupKind.STATE
    )


@pytest.mark.parametrize(
    ("name", "per_token", "per_request"),
    [
        # attention layers x K and V x KV heads x head_dim x bytes
        ("llama-3-70b", 80 * 2 * 8 * 128 * 2, 0),
        ("qwen3-8b", 36 * 2 * 8 * 128 * 2, 0),
        ("gemma-3", 62 * 2 * 16 * 128 * 2, 0),
        ("gpt-oss", 36 * 2 * 8 * 64 * 2, 0),
        # layers x (kv_lora_rank + qk_rope_head_dim) x bytes, and 128 + 4 bytes of the indexer
        ("deepseek-v3", 61 * (512 + 64) * 2, 0),
        ("deepseek-v3.2", 61 * ((512 + 64) * 2 + 128 + 4), 0),
        # 24 Mamba2 layers: 3 rows of (128 x 64 + 2 x 8 x 128) channels, and 128 heads of 64 x 128
        ("nemotron-h-8b", 4 * 2 * 8 * 128 * 2, 24 * (3 * (8192 + 2048) * 2 + 128 * 64 * 128 * 2)),
        # 36 gated delta nets: 3 rows of (2 x 16 + 32) x 128 channels, and 32 heads of 128 x 128 in float32
        ("qwen3-next", 12 * 2 * 2 * 256 * 2, 36 * (3 * 64 * 128 * 2 + 32 * 128 * 128 * 4)),
        ("falcon-mamba-7b", 0, 64 * (3 * 8192 * 2 + 8192 * 16 * 2)),
    ],
)
def test_what_a_model_caches(name: str, per_token: int, per_request: int) -> None:
    """On one rank nothing is replicated."""
    ((_, layout),) = deploy(name).values()
    assert token_bytes(layout) == per_token
    assert state_bytes(layout) == per_request


V4_RECORD, INDEX_KEY = 448 + 2 * 64 + 8, 128 + 4


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        # layers x bytes of 1,024 tokens, or of a request's state
        (
            "deepseek-v4",
            {
                "sliding": 43 * 1024 * V4_RECORD,
                "full": 21 * 256 * (V4_RECORD + INDEX_KEY) + 20 * 8 * V4_RECORD,
                "compressor.4": 21 * 1024 * 4 * (4 * 512 + 4 * 128),
                "compressor.128": 20 * 1024 * 4 * 2 * 512,
            },
        ),
        (
            "deepseek-v4.1",
            {
                "sliding": 40 * 1024 * 528,
                "full": 3 * 512 * (528 + INDEX_KEY) + 1024 * (528 + INDEX_KEY),
                "compressor": 3 * 8 * 2 * 512 * 4,
            },
        ),
        (
            "glm-5-next",
            {
                "full": 11 * (1024 * 2 * 512 + 64 * INDEX_KEY),
                "state.0": 34 * (3 * 3 * 64 * 128 * 2 + 64 * 128 * 128 * 4),
                "indexer.tail": 11 * 16 * 2 * 128 * 2,
            },
        ),
        (
            "step-5",
            {
                "full": 23 * (1024 * 2 * 4 * 192 * 2 + 128 * 256),
                "sliding": 69 * 1024 * 2 * 4 * 192 * 2,
                "summary.ring": 23 * 8 * 1024,
            },
        ),
        ("minimax-m3", {"full": 60 * 1024 * 2 * 4 * 128 * 2 + 57 * 1024 * 128 * 2}),
        (
            "qwen4",
            {
                "full": 12 * (1024 * 2 * 2 * 256 * 2 + 256 * 128 * 2),
                "state.0": 36 * (3 * (2 * 16 + 48) * 128 * 2 + 48 * 128 * 128 * 4),
                "indexer.ring": 12 * 4 * (128 * 2 + 3 * 8),
                "ple": 4 * 2560 * 9 * 2,
            },
        ),
    ],
)
def test_what_a_model_with_side_caches_keeps_in_each_group(name: str, groups: dict[str, int]) -> None:
    ((_, layout),) = deploy(name).values()
    found = dict.fromkeys((group.name for group in layout.groups), 0)
    of_states = {group.name for group in layout.groups if group.kind is GroupKind.STATE}
    for tensor in layout.tensors:
        items = 1 if tensor.group in of_states else 1024 // tensor.granule_tokens
        found[tensor.group] += items * tensor.num_units * tensor.content_bytes
    assert found == groups


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


def test_layers_of_each_kind() -> None:
    """Which layers the groups hold."""
    ((_, gemma),) = deploy("gemma-3").values()
    assert sorted({t.layer for t in gemma.tensors if t.group == "full"}) == list(range(5, 62, 6))
    assert {g.name: g.sliding_window for g in gemma.groups} == {"full": None, "sliding": 1023}
    ((_, oss),) = deploy("gpt-oss-20b").values()
    assert sorted({t.layer for t in oss.tensors if t.group == "sliding"}) == list(range(0, 24, 2))
    ((_, nemotron),) = deploy("nemotron-h").values()
    assert sorted({t.layer for t in nemotron.tensors if t.group == "full"}) == [7, 18, 29, 40]


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
