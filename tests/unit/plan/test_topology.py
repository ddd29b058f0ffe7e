"""The field's vocabulary, pinned to the golden numbers (rows 1 to 3)."""

from __future__ import annotations

import math

import msgspec
import pytest

from kvxferd.errors import Code, EngineError
from kvxferd.ids import EngineId, Generation, Rank
from kvxferd.layout.presets import deploy, shard_units
from kvxferd.plan import (
    EngineTransferInfo,
    MambaEngineTransferInfo,
    TransferTopology,
    plan_reads,
    stage_infos,
)
from tests.support.attention_engines import engine, layout_of, plan_between, spec

REMOTE = EngineId("remote")


def topology(tp: int, rank: int = 0, *, heads: int = 8, block_tokens: int = 16) -> TransferTopology:
    """Return the topology of one rank of a plain engine."""
    own = spec(tp=tp, heads=heads, rank=(0, rank))
    return TransferTopology(own, layout_of(own, block_tokens=block_tokens))


def info(tp: int, **facts: int) -> EngineTransferInfo:
    """Return facts built by hand."""
    return EngineTransferInfo(tp, 1024, 16, **facts)


@pytest.mark.parametrize(("tp", "remote_tp", "want"), [(4, 2, 2), (2, 4, -2), (2, 2, 1), (1, 8, -8)])
def test_tp_ratio(tp: int, remote_tp: int, want: int) -> None:
    """GOLDEN row 1."""
    assert topology(tp).tp_ratio(remote_tp) == want


@pytest.mark.parametrize(("tp", "remote_tp"), [(3, 2), (6, 4)])
def test_tp_sizes_that_do_not_divide_have_no_ratio(tp: int, remote_tp: int) -> None:
    """GOLDEN row 1: an error that names both, and a description nonetheless."""
    made = topology(tp)
    with pytest.raises(ValueError, match=f"{tp}.*{remote_tp}"):
        made.tp_ratio(remote_tp)
    made.register_remote_engine(REMOTE, info(remote_tp))
    assert f"tp_ratio={tp}:{remote_tp}" in made.describe(REMOTE)


def test_block_size_ratio() -> None:
    """GOLDEN row 1."""
    assert topology(1, block_tokens=32).block_size_ratio(16) == 2
    with pytest.raises(ValueError, match=r"16.*32"):
        topology(1, block_tokens=16).block_size_ratio(32)


@pytest.mark.parametrize(
    ("tp", "heads", "want"), [(8, 2, [0, 0, 0, 0, 1, 1, 1, 1]), (8, 4, [0, 0, 1, 1, 2, 2, 3, 3])]
)
def test_head_of_a_rank_beyond_the_heads(tp: int, heads: int, want: list[int]) -> None:
    """GOLDEN row 1: r*K//TP."""
    assert [shard_units(heads, tp, rank)[0].start for rank in range(tp)] == want


@pytest.mark.parametrize(
    ("heads", "tp", "want"),
    [(8, 2, [4, 4]), (8, 8, [1] * 8), (4, 8, [1] * 8), (8, 3, [3, 3, 2])],
)
def test_local_physical_heads(heads: int, tp: int, want: list[int]) -> None:
    """GOLDEN row 1: for unequal shards, the rank's real count."""
    assert [topology(tp, rank, heads=heads).local_physical_heads for rank in range(tp)] == want


@pytest.mark.parametrize(
    ("tp", "remote_tp", "want"),
    [
        (4, 2, [[0], [0], [1], [1]]),
        (2, 4, [[0, 1], [2, 3]]),
        (3, 2, [[0], [0, 1], [1]]),  # sizes that do not divide: those whose share meets ours
    ],
)
def test_handshake_target_ranks(tp: int, remote_tp: int, want: list[list[int]]) -> None:
    """GOLDEN row 2."""
    assert [topology(tp, rank).handshake_target_ranks(remote_tp) for rank in range(tp)] == want


@pytest.mark.parametrize(
    ("remote_tp", "is_replicated", "handshake", "target"),
    [(1, False, [0], [0]), (2, False, [1], [1]), (4, True, [2, 3], [2])],
)
def test_target_remote_ranks(
    remote_tp: int, is_replicated: bool, handshake: list[int], target: list[int]
) -> None:
    """GOLDEN row 2: K2, L2, r1; by hand and from the plan alike."""
    by_hand, planned = topology(2, 1, heads=2), topology(2, 1, heads=2)
    by_hand.register_remote_engine(REMOTE, info(remote_tp))
    source = engine(tp=remote_tp, heads=2, block_tokens=16)
    remote_spec = msgspec.structs.replace(spec(tp=remote_tp, heads=2), engine_id=REMOTE)
    planned.register_remote_ranks(remote_spec, {rank: held[1] for rank, held in source.items()})
    for made in (by_hand, planned):
        assert made.is_kv_replicated(REMOTE) is is_replicated
        assert made.replicates_kv_cache(REMOTE) is is_replicated
        assert made.handshake_target_ranks(remote_tp) == handshake
        assert made.target_remote_ranks(REMOTE) == target


def test_an_engine_without_heads_is_replicated_but_not_by_its_heads() -> None:
    """MLA."""
    own = spec(tp=2, heads=0, rank=(0, 1))
    made = TransferTopology(own, layout_of(spec(heads=1)))
    made.register_remote_engine(REMOTE, info(4))
    assert made.is_mla
    assert made.replicates_kv_cache(REMOTE)
    assert not made.is_kv_replicated(REMOTE)
    assert made.target_remote_ranks(REMOTE) == [2]


@pytest.mark.parametrize(
    ("model", "is_mla", "is_mamba"),
    [
        ("llama-3-8b", False, False),
        ("deepseek-v3", True, False),
        ("nemotron-h-8b", False, True),
        ("qwen3-next", False, True),
        ("falcon-mamba-7b", False, True),  # states alone: no attention, so no latents either
    ],
)
def test_kinds_of_models(model: str, is_mla: bool, is_mamba: bool) -> None:
    """The same on every stage, also on one that holds no layer of a kind."""
    for own, layout in deploy(model, tp=2, pp=16, num_blocks=2).values():
        made = TransferTopology(own, layout)
        assert (made.is_mla, made.is_mamba) == (is_mla, is_mamba)


def test_two_stages_are_kept_apart() -> None:
    """GOLDEN row 3: the default pp_rank is stage 0; keys (e, 0) and (e, 1); layers (0, 16) and (16, 32)."""
    made = topology(1)
    first = made.register_remote_engine(REMOTE, info(2, start_layer=0, end_layer=16))
    second = made.register_remote_engine(REMOTE, info(2, remote_pp_rank=1, start_layer=16, end_layer=32))
    assert made.get_engine_info(REMOTE) is first
    assert made.get_engine_info(REMOTE, 0) is first
    assert made.get_engine_info(REMOTE, 1) is second
    assert (first.start_layer, first.end_layer) == (0, 16)
    assert (second.start_layer, second.end_layer) == (16, 32)


def test_defaults_of_facts_built_by_hand() -> None:
    """A stage without layers is stage 0."""
    made = EngineTransferInfo(2, 1024, 16)
    assert (made.remote_pp_rank, made.start_layer, made.end_layer) == (0, 0, 0)


def test_registering_is_idempotent_and_strict() -> None:
    """The same facts give the kept object; others are refused until the generation changes."""
    made = topology(2)
    kept = made.register_remote_engine(REMOTE, info(4), Generation("a"))
    assert made.register_remote_engine(REMOTE, info(4), Generation("a")) is kept
    with pytest.raises(EngineError, match="remote_tp_size was 4 and is 8") as caught:
        made.register_remote_engine(REMOTE, info(8), Generation("a"))
    assert caught.value.code is Code.SHAPE_MISMATCH
    assert made.register_remote_engine(REMOTE, info(8), Generation("b")).remote_tp_size == 8
    made.expire(math.inf)
    with pytest.raises(EngineError) as caught:
        made.get_engine_info(REMOTE)
    assert caught.value.code is Code.ENGINE_UNKNOWN


def test_facts_of_another_kind_are_refused() -> None:
    """A hybrid's facts for an engine that was registered without states."""
    made = topology(2)
    made.register_remote_engine(REMOTE, info(4))
    with pytest.raises(EngineError, match="were EngineTransferInfo and are MambaEngineTransferInfo"):
        made.register_remote_engine(REMOTE, MambaEngineTransferInfo(4, 1024, 16))


def test_a_remote_without_ranks_has_no_ratio() -> None:
    """Nonsense is a ValueError too."""
    with pytest.raises(ValueError, match="remote TP 0"):
        topology(2).tp_ratio(0)


@pytest.mark.parametrize(("tp", "heads", "want"), [(2, 2, False), (4, 2, True), (2, 8, False)])
def test_local_replicas(tp: int, heads: int, want: bool) -> None:
    """Strictly more ranks than heads."""
    assert topology(tp, heads=heads).local_replicates_kv_cache is want


def test_a_rank_does_not_register_its_own_engine() -> None:
    """Local identity comes from the spec."""
    with pytest.raises(EngineError, match="this rank's own"):
        topology(2).register_remote_engine(EngineId("prefill"), info(2))


def test_registration_from_layouts_fills_every_fact() -> None:
    """Each stage's own first layer, block length and layers."""
    source = engine(tp=2, pp=2, layers=5, heads=4, block_tokens=8, layout="HND-blocks-first")
    infos = stage_infos(source[Rank(0, 0)][0], {rank: held[1] for rank, held in source.items()})
    page = 2 * 2 * 8 * 4  # K and V, heads, tokens, bytes
    assert infos == {
        0: EngineTransferInfo(2, page, 8, 1, 0, 0, 3),
        1: EngineTransferInfo(2, page, 8, 1, 1, 3, 5),
    }


def test_reads_sum_up_a_plan() -> None:
    """What explain prints: layers, heads and bytes by source."""
    plan = plan_between(engine(layers=3, heads=4), engine(tp=2, pp=2, layers=3, heads=4))
    reads = plan_reads(plan)
    assert [(r.source, r.start_layer, r.end_layer) for r in reads] == [
        (Rank(0, 0), 0, 2),
        (Rank(0, 1), 0, 2),
        (Rank(1, 0), 2, 3),
        (Rank(1, 1), 2, 3),
    ]
    assert [[(u.start, u.stop) for u in r.units["k"]] for r in reads] == [[(0, 2)], [(2, 4)]] * 2
    assert [r.bytes_per_token for r in reads] == [32, 32, 16, 16]  # K, V, 2 heads, 4 bytes, layers


def test_a_stage_without_ranks_is_refused() -> None:
    with pytest.raises(EngineError, match="its remote_tp_size is 0; give the number of ranks") as refused:
        topology(2).register_remote_engine(REMOTE, info(0))
    assert refused.value.code is Code.SHAPE_MISMATCH
