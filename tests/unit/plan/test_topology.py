"""The field's vocabulary, pinned to the golden numbers (rows 1 to 3)."""

from __future__ import annotations

import msgspec
import pytest

from kvxferd.errors import Code, EngineError
from kvxferd.ids import EngineId, Rank
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.layout.presets import deploy
from kvxferd.layout.sharding import shard_units
from kvxferd.layout.tensors import num_units
from kvxferd.plan import EngineTransferInfo, TransferTopology, stage_infos
from tests.support.attention_engines import engine, layout_of, spec
from tests.support.fetched_engine import HOME, register

REMOTE = EngineId("remote")


def topology(tp: int, rank: int = 0, *, heads: int = 8, block_tokens: int = 16) -> TransferTopology:
    """Return the topology of one rank of a plain engine."""
    own = spec(tp=tp, heads=heads, rank=(0, rank))
    return TransferTopology(own, layout_of(own, block_tokens=block_tokens))


def source(**facts: int | str) -> dict[Rank, tuple[EngineSpec, RankLayout]]:
    """Return every rank of a remote engine."""
    return {
        rank: (msgspec.structs.replace(own, engine_id=REMOTE), layout)
        for rank, (own, layout) in engine(**facts).items()  # type: ignore[arg-type]
    }


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
    register(made, source(tp=remote_tp, heads=8))
    assert "tp_ratio=None" in made.describe(REMOTE)


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
def test_physical_heads(heads: int, tp: int, want: list[int]) -> None:
    """GOLDEN row 1: for unequal shards, the rank's real count."""
    assert [num_units(shard_units(heads, tp, rank)) for rank in range(tp)] == want
    assert [layout.tensors[0].num_units for _, layout in engine(tp=tp, heads=heads).values()] == want


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
    ("dcp", "tp", "remote_dcp", "remote_tp", "want"),
    [
        # Each is (dcp_size in 1, tp_size) of vLLM's formula: r % local DCP, or local rank % remote DCP.
        (1, 2, 4, 4, [[0, 1, 2, 3]] * 2),
        (2, 2, 4, 4, [[0, 2], [1, 3]]),
        (4, 4, 2, 2, [[0], [1], [0], [1]]),
        (2, 2, 1, 2, [[0], [1]]),
        # Two shares of the heads and two of the tokens on both sides: one rank each.
        (2, 4, 2, 4, [[0], [1], [2], [3]]),
        (3, 3, 2, 2, [[0, 1]] * 3),  # sizes that do not divide
    ],
)
def test_handshake_target_ranks_of_engines_that_share_tokens(
    dcp: int, tp: int, remote_dcp: int, remote_tp: int, want: list[list[int]]
) -> None:
    ranks = deploy("tiny-mla", tp=tp // dcp, cp=dcp)
    found = [
        TransferTopology(*ranks[Rank(0, rank)]).handshake_target_ranks(remote_tp, remote_dcp)
        for rank in range(tp)
    ]
    assert found == want


def test_terms_tell_who_shares_tokens() -> None:
    made = TransferTopology(*deploy("tiny-mla", tp=1, cp=2)[Rank(0, 1)])
    register(made, deploy("tiny-mla", tp=1, cp=4, engine_id=REMOTE))
    terms = made.terms(REMOTE)
    assert (terms["local_dcp_size"], terms["remote_dcp_size"]) == (2, 4)
    assert terms["handshake_target_ranks"] == terms["target_remote_ranks"] == [1, 3]


@pytest.mark.parametrize(
    ("remote_tp", "is_replicated", "handshake", "target"),
    [(1, False, [0], [0]), (2, False, [1], [1]), (4, True, [2, 3], [2])],
)
def test_target_remote_ranks(
    remote_tp: int, is_replicated: bool, handshake: list[int], target: list[int]
) -> None:
    """GOLDEN row 2: K2, L2, r1."""
    made = topology(2, 1, heads=2)
    register(made, source(tp=remote_tp, heads=2))
    assert made.is_kv_replicated(REMOTE) is is_replicated
    assert made.replicates_kv_cache(REMOTE) is is_replicated
    assert made.handshake_target_ranks(remote_tp) == handshake
    assert made.target_remote_ranks(REMOTE) == target


def test_two_stages_are_kept_apart() -> None:
    """GOLDEN row 3: the default pp_rank is stage 0; keys (e, 0) and (e, 1); layers (0, 16) and (16, 32)."""
    own = spec(layers=32)
    made = TransferTopology(own, layout_of(own))
    register(made, source(tp=2, pp=2, layers=32))
    first, second = made.get_engine_info(REMOTE), made.get_engine_info(REMOTE, 1)
    assert made.get_engine_info(REMOTE, 0) is first
    assert (first.remote_pp_rank, second.remote_pp_rank) == (0, 1)
    assert (first.start_layer, first.end_layer) == (0, 16)
    assert (second.start_layer, second.end_layer) == (16, 32)
    with pytest.raises(EngineError, match="engine 'remote', stage 2: it is not registered") as caught:
        made.get_engine_info(REMOTE, 2)
    assert caught.value.code is Code.ENGINE_UNKNOWN


def test_terms_of_a_stage_of_attention() -> None:
    """No words for states. A log has them as one line."""
    made = topology(2, 1, heads=2)
    register(made, source(tp=4, heads=2, block_tokens=16))
    terms = made.terms(REMOTE)
    assert (terms["local_rank"], terms["generation"], terms["home"]) == (Rank(0, 1), "g1", HOME)
    assert (terms["remote_block_len"], terms["remote_block_size"]) == (64, 16)  # 16 tokens of 4 bytes
    assert (terms["tp_ratio"], terms["block_size_ratio"]) == (-2, 1)
    assert (terms["handshake_target_ranks"], terms["target_remote_ranks"]) == ([2, 3], [2])
    assert "fa_head_slots" not in terms
    line = made.describe(REMOTE)
    assert line.startswith("TransferTopology(local_engine_id=prefill, local_rank=pp0.tp1, ")
    assert "\n" not in line


def test_registration_from_layouts_fills_every_fact() -> None:
    """Each stage's own first layer, block length and layers."""
    source = engine(tp=2, pp=2, layers=5, heads=4, block_tokens=8, layout="HND-blocks-first")
    infos = stage_infos(source[Rank(0, 0)][0], {rank: held[1] for rank, held in source.items()})
    page = 2 * 2 * 8 * 4  # K and V, heads, tokens, bytes
    assert infos == {
        0: EngineTransferInfo(2, page, 8, 1, 0, 0, 3),
        1: EngineTransferInfo(2, page, 8, 1, 1, 3, 5),
    }
