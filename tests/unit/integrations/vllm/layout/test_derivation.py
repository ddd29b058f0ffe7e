"""What is derived of tensors and specs, kind by kind, and what is refused by name."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvxferd.errors import Code, LayoutError
from kvxferd.integrations.vllm.layout.derivation import DerivedCaches, derive_layout
from kvxferd.integrations.vllm.layout.facts import (
    AttentionFacts,
    CacheGroup,
    CacheKind,
    LayerFacts,
    StateFacts,
    WorkerFacts,
)
from kvxferd.integrations.vllm.layout.groups import CacheGroups
from kvxferd.layout import CacheTensor, EngineSpec, TokenShard, UnitRange
from kvxferd.layout.validate import validate_layout
from tests.support.vllm_pages import CPU, FLASH, LAYOUTS

BLOCKS, TOKENS = 4, 16
ATTENTION = AttentionFacts(2, 8, 8, "bfloat16", 2)
LATENT = AttentionFacts(1, 24, 0, "bfloat16", 2)
INDEXER = AttentionFacts(1, 132, 0, "uint8", 1)
ODD_INDEXER = AttentionFacts(1, 100, 0, "uint8", 1)
ONE_HEAD = AttentionFacts(1, 8, 8, "bfloat16", 2)
WORKER = WorkerFacts(0, 4, 4, 2, num_blocks=BLOCKS, device="NVIDIA H100 9.0", vllm_version="0.33.0")
FULL = CacheGroups((CacheGroup(0, CacheKind.FULL, TOKENS),), 1)


def name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


def a_layer(layer: int = 1, cache: AttentionFacts | StateFacts = ATTENTION, **more: object) -> LayerFacts:
    facts = {"group": 0, "backend": FLASH} | more
    facts = {"implementation": "vllm.backends.Some", "cache_dtype": "auto"} | facts
    return LayerFacts(name(layer), cache=cache, **facts)  # type: ignore[arg-type]


def a_cache(heads: int = 2, content: int = 16, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(BLOCKS, heads, TOKENS, content, dtype=dtype)


NOT_HEAD_BY_HEAD = a_cache().transpose(1, 2).contiguous().transpose(1, 2)


def tensor_of(derived: DerivedCaches, component: str, layer: int = 1) -> CacheTensor:
    (found,) = [t for t in derived.layout.tensors if (t.layer, t.component) == (layer, component)]
    return found


def valid(derived: DerivedCaches, worker: WorkerFacts = WORKER) -> DerivedCaches:
    spec = EngineSpec(
        "e", "g", worker.num_layers, worker.pp_size, worker.tp_size, worker.pp_rank, worker.tp_rank
    )
    validate_layout(spec, derived.layout)
    return derived


class TestAttention:
    def test_a_layer_with_heads_of_its_own_number(self) -> None:
        worker = dataclasses.replace(WORKER, tp_size=2, tp_rank=1, num_kv_heads=8)
        derived = valid(derive_layout({name(1): a_cache()}, [a_layer()], FULL, worker), worker)
        assert tensor_of(derived, "k").units == (UnitRange(2, 4),)

    def test_layers_that_use_anothers_cache_are_described_by_its_owner(self) -> None:
        cache = a_cache()
        derived = valid(derive_layout({name(1): cache, name(3): cache}, [a_layer()], FULL, WORKER))
        assert {t.layer for t in derived.layout.tensors} == {1}


class TestGroupsAndStages:
    def test_a_stage_without_layers_of_a_group_has_the_group(self) -> None:
        groups = CacheGroups(
            (CacheGroup(0, CacheKind.FULL, TOKENS), CacheGroup(1, CacheKind.SLIDING, 8, 31)), 2
        )
        derived = valid(derive_layout({name(1): a_cache()}, [a_layer()], groups, WORKER))
        assert [(g.name, g.sliding_window) for g in derived.layout.groups] == [
            ("0.full", None),
            ("1.sliding", 31),
        ]

    def test_layers_are_counted_over_all_stages(self) -> None:
        worker = WorkerFacts(2, 4, 4, 2, pp_size=2, pp_rank=1, num_blocks=BLOCKS)
        derived = valid(derive_layout({name(3): a_cache()}, [a_layer(3)], FULL, worker), worker)
        assert (derived.layout.start_layer, derived.layout.end_layer) == (2, 4)
        with pytest.raises(LayoutError, match=r"layer 1 is none of this rank's, \[2, 4\)"):
            derive_layout({name(1): a_cache()}, [a_layer(1)], FULL, worker)

    @pytest.mark.parametrize(
        "draft",
        [
            "model.layers.4.self_attn.attn",
            "draft_model.model.layers.0.attn",
            "mtp.layers.0.self_attn.attn",
        ],
    )
    def test_a_drafts_layers_follow_the_models_on_the_last_stage(self, draft: str) -> None:
        worker = dataclasses.replace(WORKER, num_draft_layers=1, num_draft_kv_heads=2)
        layers = [a_layer(), dataclasses.replace(a_layer(), name=draft)]
        derived = valid(derive_layout({name(1): a_cache(), draft: a_cache()}, layers, FULL, worker), worker)
        assert derived.layout.end_layer == 5
        assert tensor_of(derived, "k", 4).units == (UnitRange(0, 2),)

    def test_two_attentions_in_one_layer(self) -> None:
        names = ["model.layers.1.self_attn.0.attn", "model.layers.1.self_attn.1.attn"]
        layers = [dataclasses.replace(a_layer(), name=n) for n in names]
        derived = valid(derive_layout({n: a_cache() for n in names}, layers, FULL, WORKER))
        assert [t.component for t in derived.layout.tensors] == ["k.0", "k.1", "v.0", "v.1"]

    def test_context_parallel_ranks_hold_turns_of_the_tokens(self) -> None:
        groups = CacheGroups((CacheGroup(0, CacheKind.FULL, TOKENS, shard_count=4),), 1)
        worker = dataclasses.replace(WORKER, num_kv_heads=0, tp_size=8, tp_rank=6, dcp_size=4, interleave=8)
        layer = a_layer(cache=LATENT, backend="FlashMLABackend")
        derived = valid(derive_layout({name(1): a_cache(1, 24)}, [layer], groups, worker), worker)
        assert derived.layout.groups[0].token_shard == TokenShard(4, 2, 8)


@pytest.mark.parametrize(
    ("layer", "cache", "why"),
    [
        (a_layer(backend=""), a_cache(), "its attention backend has no name"),
        (a_layer(), a_cache(heads=4), "has 4 heads of 32 bytes, its spec 2 of 32"),
        (a_layer(), a_cache(content=8), "has 2 heads of 16 bytes, its spec 2 of 32"),
        (a_layer(), torch.zeros(BLOCKS, 512, dtype=torch.bfloat16), "shape (4, 512) is none that is known"),
        (a_layer(), torch.zeros(2, 2, TOKENS, 2, 8, dtype=torch.bfloat16), "is none that is known here"),
        (a_layer(), a_cache()[:, :, :8], "4 blocks of 8 tokens, its group 4 of 16"),
        (a_layer(), torch.zeros(3, 2, TOKENS, 16, dtype=torch.bfloat16), "has 3 blocks"),
        (a_layer(), a_cache()[..., ::1].transpose(2, 3), "heads of"),
        (a_layer(backend=CPU, isa="vec"), NOT_HEAD_BY_HEAD, "in one piece"),
        (a_layer(backend=CPU), a_cache(), "the instruction set"),
        (a_layer(backend=CPU, isa="amx"), a_cache(), "a head of 8 elements is no whole number of 16"),
        (
            a_layer(cache=INDEXER, backend="DeepseekV4IndexerBackend"),
            torch.zeros(BLOCKS, 1, TOKENS * 2, 132, dtype=torch.uint8)[:, :, ::2],
            "its states of 132 bytes are 264 bytes apart",
        ),
        (a_layer(cache=ONE_HEAD), a_cache(1), "1 of 6 are held by rank 0 of 2"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_by_name(layer: LayerFacts, cache: torch.Tensor, why: str) -> None:
    worker = dataclasses.replace(WORKER, num_kv_heads=6, tp_size=2) if "of 6" in why else WORKER
    with pytest.raises(LayoutError) as caught:
        derive_layout({layer.name: cache}, [layer], FULL, worker)
    assert caught.value.code is Code.LAYOUT_INVALID
    assert caught.value.message.startswith(f"cannot describe the cache of layer {layer.name!r}: ")
    assert why in caught.value.message


@pytest.mark.parametrize(
    ("layer", "caches", "why"),
    [
        (a_layer(), [], "vLLM registered no tensor for it"),
        (a_layer(), [name(1), name(2)], "no cache group has it, and its tensor is no other layer's"),
        (dataclasses.replace(a_layer(), name="model.embed.attn"), ["model.embed.attn"], "no layer number"),
        (a_layer(9), [name(9)], "layer 9 is none"),
    ],
)
def test_layers_and_tensors_must_correspond_by_names_that_tell_the_layer(
    layer: LayerFacts, caches: list[str], why: str
) -> None:
    with pytest.raises(LayoutError) as caught:
        derive_layout({one: a_cache() for one in caches}, [layer], FULL, WORKER)
    assert why in caught.value.message


@pytest.mark.parametrize(
    ("layer", "cache"),
    [
        (a_layer(backend="UnheardOfBackend"), a_cache()),
        (a_layer(backend="UnheardOfBackend", isa="amx"), a_cache()),
        (a_layer(backend="UnheardOfBackend", has_mx_scales=True), a_cache()),
        (a_layer(is_plugin_dtype=True), a_cache()),
        (a_layer(cache=LATENT), a_cache(1, 24)),  # a latent of a backend of keys and values
        (a_layer(cache=ODD_INDEXER, backend="DeepseekV4IndexerBackend"), a_cache(1, 100, torch.uint8)),
        (a_layer(cache=dataclasses.replace(ATTENTION, encoding="nvfp4")), a_cache()),
        (a_layer(cache=dataclasses.replace(ATTENTION, packed_bytes=40)), a_cache(content=20)),
        (a_layer(cache=dataclasses.replace(ATTENTION, num_head_slots=4)), a_cache(4)),
        (a_layer(cache=dataclasses.replace(ONE_HEAD, num_heads=5, num_head_slots=1)), a_cache(1)),
    ],
)  # fmt: skip
def test_what_a_block_holds_need_not_be_known(layer: LayerFacts, cache: torch.Tensor) -> None:
    worker = dataclasses.replace(WORKER, tp_size=2, tp_rank=1, vllm_version="0.33.0")
    derived = valid(derive_layout({layer.name: cache}, [layer], FULL, worker), worker)
    (page,) = derived.layout.tensors
    assert (page.component, page.units, page.granule_tokens) == ("page", (UnitRange(1, 2),), TOKENS)
    assert page.content_bytes == cache[0].numel() * cache.element_size()
    assert page.encoding.startswith(f"opaque: {layer.backend}, ")
    kernels = " amx" if layer.isa else " mx scales" if layer.has_mx_scales else ""  # by what they were chosen
    assert page.encoding.endswith(
        "blocks of 16 tokens, cache dtype auto, tp 2, vllm.backends.Some, "
        f"NVIDIA H100 9.0{kernels}, vllm 0.33.0"
    )
    assert derived.opaque_layers == {layer.backend: 1}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_opaque_page_is_all_bytes_of_a_block_in_the_order_that_it_names(layout: str) -> None:
    sizes = {"L": 3, "B": BLOCKS, "H": 2, "N": TOKENS, "C": 16}
    buffer = torch.zeros([sizes[axis] for axis in layout], dtype=torch.int16)
    views = list(buffer.permute([layout.index(axis) for axis in sizes]))
    for number, view in enumerate(views):
        view.copy_(torch.arange(view.numel()).view(view.shape) + 10_000 * number)
    layers = [a_layer(number, backend="UnheardOfBackend") for number in range(3)]
    derived = valid(derive_layout({name(i): view for i, view in enumerate(views)}, layers, FULL, WORKER))
    memory = torch.empty(0, dtype=torch.uint8).set_(views[0].untyped_storage())
    start = derived.storages[0].address - views[0].untyped_storage().data_ptr()
    for number, view in enumerate(views):
        page = tensor_of(derived, "page", number)
        at = start + page.offset + 2 * page.block_stride
        places = [at + chunk * page.chunk_stride for chunk in range(page.num_chunks)]
        found = torch.cat([memory[place : place + page.chunk_bytes] for place in places]).view(torch.int16)
        order = "NHC" if layout.index("N") < layout.index("H") else "HNC"
        assert f", {order} of 2 x 16 x 32 bytes," in page.encoding
        expected = view[2].permute(["HNC".index(axis) for axis in order])
        assert torch.equal(found, expected.flatten())


@pytest.mark.parametrize("is_plugin_dtype", [False, True])
def test_a_ring_is_opaque_where_a_plugin_alone_knows_its_rows(is_plugin_dtype: bool) -> None:
    layer = a_layer(cache=LATENT, backend="KpoolTailBackend", is_plugin_dtype=is_plugin_dtype)
    groups = CacheGroups((CacheGroup(0, CacheKind.STATE, TOKENS),), 1)
    derived = valid(derive_layout({name(1): a_cache(1, 24)}, [layer], groups, WORKER))
    (ring,) = derived.layout.tensors
    assert (ring.content_bytes, ring.granule_tokens) == (TOKENS * 24 * 2, 1)
    assert (ring.component, ring.encoding) == (
        ("page", ring.encoding) if is_plugin_dtype else ("ring", "ring of 16")
    )
    assert derived.opaque_layers == ({"KpoolTailBackend": 1} if is_plugin_dtype else {})


UNHEARD_OF = a_layer(backend="UnheardOfBackend")
IN_PIECES = torch.zeros(BLOCKS, 2, TOKENS, 2, 16, dtype=torch.bfloat16)[:, :, :, 0]


@pytest.mark.parametrize(
    ("layer", "cache", "worker", "why"),
    [
        (UNHEARD_OF, a_cache(), {"device": ""}, "the device that writes them has no name"),
        (UNHEARD_OF, a_cache(), {"vllm_version": ""}, "set opaque_cache_version"),
        (
            dataclasses.replace(UNHEARD_OF, cache_dtype=""),
            a_cache(),
            {},
            "the dtype of its cache has no name",
        ),
        (
            dataclasses.replace(UNHEARD_OF, implementation=""),
            a_cache(),
            {},
            "their backend has no class in vLLM or in an installed",
        ),
        (UNHEARD_OF, IN_PIECES, {}, "a block of shape (2, 16, 16) lies in pieces of 32 bytes"),
    ],
)
def test_an_opaque_page_of_which_something_is_not_known_is_refused(
    layer: LayerFacts, cache: torch.Tensor, worker: dict[str, str], why: str
) -> None:
    with pytest.raises(LayoutError) as caught:
        derive_layout({layer.name: cache}, [layer], FULL, dataclasses.replace(WORKER, **worker))
    assert why in caught.value.message


@pytest.mark.parametrize(
    ("layer", "content", "why"),
    [
        (
            a_layer(cache=dataclasses.replace(LATENT, tokens_per_state=4), backend="FlashMLABackend"),
            24,
            "cp_kv_cache_interleave_size is 2, and a state stands for 4 tokens",
        ),
        (
            a_layer(cache=LATENT, backend="UnheardOfBackend"),
            24,
            "decode_context_parallel_size is 2, and which tokens a block of UnheardOfBackend holds",
        ),
    ],
)
def test_tokens_on_several_ranks_are_whole_states_of_known_blocks(
    layer: LayerFacts, content: int, why: str
) -> None:
    assert isinstance(layer.cache, AttentionFacts)
    groups = CacheGroups((CacheGroup(0, CacheKind.FULL, TOKENS, shard_count=2),), 1)
    worker = dataclasses.replace(WORKER, num_kv_heads=0, tp_size=2, dcp_size=2, interleave=2)
    cache = torch.zeros(BLOCKS, 1, TOKENS // layer.cache.tokens_per_state, content, dtype=torch.bfloat16)
    with pytest.raises(LayoutError, match=why):
        derive_layout({layer.name: cache}, [layer], groups, worker)
