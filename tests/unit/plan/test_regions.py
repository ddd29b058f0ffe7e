"""Layout properties, transfer regions and the sender's plan: golden rows 10 to 12."""

from __future__ import annotations

import itertools

import pytest

from kvxferd.ids import Rank
from kvxferd.layout import EngineSpec, GroupKind, RankLayout
from kvxferd.layout.presets import LayerKind, ModelFacts, TokenComponent, deploy, find_model
from kvxferd.plan import (
    CacheProperties,
    SendPart,
    TransferRegion,
    TransferTopology,
    cache_properties,
    cache_properties_of_shapes,
    expand_region,
    sender_plan,
)
from tests.support.attention_engines import KV, engine, layout_of, plan_between, spec

Engine = dict[Rank, tuple[EngineSpec, RankLayout]]


def properties(blocks_first: bool = False, cross: bool = False, split: bool = False) -> CacheProperties:
    """Return the three of them."""
    return CacheProperties(blocks_first, cross, split)


@pytest.mark.parametrize(
    ("test_shape", "tensor_shape", "kinds", "want"),
    [
        ((1, 2, 16, 1, 1), None, {}, properties(blocks_first=True)),
        ((2, 1, 16, 1, 1), None, {}, properties(split=True)),
        ((1, 16, 1), None, {"is_mla": True}, properties()),
        ((2, 1, 16, 1, 1), (80, 2, 9, 16, 8, 64), {}, properties(cross=True)),
        ((1, 2, 16, 1, 1), (9, 80, 2, 16, 8, 64), {}, properties(blocks_first=True, cross=True)),
        ((2, 1, 16, 1, 1), (80, 2, 9, 16, 8, 64), {"is_hybrid": True}, properties(True, True)),
        ((), (9, 80, 2, 16, 8, 64), {"is_hybrid": True}, properties(blocks_first=True)),  # never raises
    ],
)
def test_properties_of_shapes(
    test_shape: tuple[int, ...],
    tensor_shape: tuple[int, ...] | None,
    kinds: dict[str, bool],
    want: CacheProperties,
) -> None:
    """GOLDEN row 10."""
    assert cache_properties_of_shapes(test_shape, tensor_shape, **kinds) == want


@pytest.mark.parametrize(
    ("layout", "want"),
    [
        ("HND", properties(split=True)),
        ("NHD", properties(split=True)),
        ("HND-blocks-first", properties(blocks_first=True)),
        ("NHD-packed", properties(blocks_first=True)),
        ("HND-cross-layer", properties(blocks_first=True, cross=True)),
    ],
)
def test_properties_of_strides(layout: str, want: CacheProperties) -> None:
    """The same, read off a layout."""
    own = spec()
    assert cache_properties(layout_of(own, layout=layout)) == want
    made = TransferTopology(own, layout_of(own, layout=layout))
    assert (made.is_kv_layout_blocks_first, made.cross_layers_blocks, made.split_k_and_v) == want


def test_expanding_a_region() -> None:
    """GOLDEN row 11: base 4096, block 4096."""
    assert expand_region(4096, 4096, is_blocks_first=True) == [(4096, 4096, 2048), (6144, 4096, 2048)]
    assert expand_region(4096, 4096, is_blocks_first=False) == [(4096, 4096, 4096)]


@pytest.mark.parametrize(
    ("layout", "want"),
    [
        # 1 layer, 4 heads of 4 bytes, blocks of 4 tokens: 64 bytes of K in a block, 16 blocks
        ("HND", [TransferRegion(4096, 64, 64), TransferRegion(4096 + 1024, 64, 64)]),
        ("HND-blocks-first", [TransferRegion(4096, 128, 64), TransferRegion(4096 + 64, 128, 64)]),
    ],
)
def test_regions_of_a_cache(layout: str, want: list[TransferRegion]) -> None:
    """GOLDEN row 11, from strides."""
    own = spec(layers=1)
    made = TransferTopology(own, layout_of(own, layout=layout))
    assert made.get_transfer_cache_regions({KV: 4096}) == want


@pytest.mark.parametrize(
    ("model", "tp", "want"),
    [
        ("nemotron-h-8b", 4, 104),  # 4 attention layers of K and V, 24 states of x, B, C and ssm
        ("qwen3-next", 2, 168),  # 12 of K and V, 36 of Q, K, V and ssm
        ("falcon-mamba-7b", 2, 128),  # 64 of x and ssm
        ("llama-3-8b", 2, 64),
        ("deepseek-v3.2", 2, 183),  # a latent, an indexer's key and its scale
    ],
)
@pytest.mark.parametrize("is_row_major", [False, True])
def test_regions_have_states_too(model: str, tp: int, want: int, is_row_major: bool) -> None:
    """A region for each tensor of every layer; together they have all bytes of a request's state."""
    arrangement = "HND+SD" if is_row_major else "HND"
    made = TransferTopology(*deploy(model, tp=tp, num_blocks=2, layout=arrangement)[Rank(0, 0)])
    regions = made.get_transfer_cache_regions({KV: 4096})
    assert len(regions) == want
    kinds = {group.name: group.kind for group in made.layout.groups}
    ordered = sorted(made.layout.tensors, key=lambda t: (t.layer, t.offset))
    facts = find_model(model)
    per_state = sum(state.num_units * state.unit_bytes for state in facts.states) // tp
    found = [
        region.kv_block_len
        for region, tensor in zip(regions, ordered, strict=True)
        if kinds[tensor.group] is GroupKind.STATE
    ]
    assert sum(found) == per_state * facts.kinds.count(LayerKind.STATE)
    assert [region.base_addr for region in regions] == [4096 + tensor.offset for tensor in ordered]


def parts(source: Engine, sink: Engine, producer: int) -> list[tuple[int, int, int, int]]:
    """Return (consumer, source offset, destination offset, length) of what a producer sends of K."""
    consumers = {rank: (held[1], plan_between(sink, source, tuple(rank))) for rank, held in sink.items()}
    sent = sender_plan(Rank(0, producer), source[Rank(0, producer)][1], consumers)
    first = sent[0].component if sent else ""
    return [(p.consumer.tp_rank, *p[3:]) for p in sent if p.component == first]


def plain(tp: int, heads: int) -> Engine:
    """One layer; a head of a block of 512 tokens has 2048 bytes."""
    return engine(tp=tp, heads=heads, layers=1, block_tokens=512)


def test_one_producer_two_consumers() -> None:
    """GOLDEN row 12: P1 to D2, parts of 4096."""
    assert parts(plain(1, 4), plain(2, 4), 0) == [(0, 0, 0, 4096), (1, 4096, 0, 4096)]


def test_four_producers_two_consumers() -> None:
    """GOLDEN row 12: P4 to D2: ranks 0 to 3 at 0, 4096, 0, 4096."""
    sent = [parts(plain(4, 8), plain(2, 8), producer) for producer in range(4)]
    assert sent == [[(0, 0, 0, 4096)], [(0, 0, 4096, 4096)], [(1, 0, 0, 4096)], [(1, 0, 4096, 4096)]]


def test_replicas_of_mla_do_not_all_send() -> None:
    """GOLDEN row 12: MLA P4 to D2: 0 and 2 send, 1 and 3 do not."""
    latent = TokenComponent("latent", 1, 8, is_replicated=True)
    model = ModelFacts("mla", 0, (LayerKind.FULL,), ((latent,),))
    source, sink = deploy(model, tp=4, num_blocks=2), deploy(model, tp=2, num_blocks=2)
    sent = [parts(source, sink, producer) for producer in range(4)]
    assert [[consumer for consumer, *_ in one] for one in sent] == [[0], [], [1], []]


def test_replicated_heads_are_sent_once() -> None:
    """GOLDEN row 12: P8 to D2, K4: D0 from P0 (slot 0) and P2 (slot 1), D1 from P4 and P6."""
    sent = [parts(plain(8, 4), plain(2, 4), producer) for producer in range(8)]
    assert sent == [
        [(0, 0, 0, 2048)],
        [],
        [(0, 0, 2048, 2048)],
        [],
        [(1, 0, 0, 2048)],
        [],
        [(1, 0, 2048, 2048)],
        [],
    ]


def test_each_unit_is_sent_exactly_once() -> None:
    """Sizes that do not divide: the producers' parts fill each consumer's block without gap or overlap."""
    source, sink = plain(3, 8), plain(2, 8)
    sent = [part for producer in range(3) for part in parts(source, sink, producer)]
    for consumer in range(2):
        filled = sorted((at, at + length) for to, _, at, length in sent if to == consumer)
        assert filled[0][0] == 0
        assert filled[-1][1] == 4 * 2048
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(filled))


def test_parts_name_layer_and_component() -> None:
    """Both, for every consumer."""
    source, sink = engine(layers=2), engine(layers=2)
    consumers = {rank: (held[1], plan_between(sink, source)) for rank, held in sink.items()}
    sent = sender_plan(Rank(0, 0), source[Rank(0, 0)][1], consumers)
    assert sent[0] == SendPart(Rank(0, 0), 0, "k", 0, 0, 64)
    assert [(part.layer, part.component) for part in sent] == [(0, "k"), (0, "v"), (1, "k"), (1, "v")]
