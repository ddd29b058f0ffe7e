"""Hybrids in the field's words, pinned to the golden numbers (rows 4 to 7)."""

from __future__ import annotations

import gc
import weakref

import msgspec
import pytest

from kvxferd.errors import Code, EngineError, PlanError
from kvxferd.ids import EngineId, Rank
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.layout.presets import LayerKind, ModelFacts, StateComponent, TokenComponent, deploy
from kvxferd.layout.presets.model_facts import key_and_value, mamba2_states
from kvxferd.plan import (
    EngineTransferInfo,
    MambaEngineTransferInfo,
    PlanCache,
    TransferTopology,
    attention_descriptor_bytes,
    stage_infos,
)

REMOTE = EngineId("remote")
STATES = mamba2_states(num_heads=16, head_dim=2, num_groups=8, state_size=2)


def hybrid(heads: int) -> ModelFacts:
    """One state layer, one attention layer."""
    kinds = (LayerKind.STATE, LayerKind.FULL)
    if heads:
        return ModelFacts("hybrid", heads, kinds, key_and_value(heads, 4), STATES)
    return ModelFacts("hybrid", 0, kinds, ((TokenComponent("latent", 1, 8, is_replicated=True),),), STATES)


def engine(
    tp: int, heads: int, pp: int = 1, engine_id: str = "local"
) -> dict[Rank, tuple[EngineSpec, RankLayout]]:
    """Every rank of a deployment of the hybrid."""
    return deploy(hybrid(heads), tp=tp, pp=pp, num_blocks=8, block_tokens=4, engine_id=engine_id)


def topology(tp: int, rank: int, remote_tp: int, heads: int, remote_pp: int = 1) -> TransferTopology:
    """Return one rank's topology with the remote engine registered."""
    made = TransferTopology(*engine(tp, heads)[Rank(0, rank)])
    source = engine(remote_tp, heads, remote_pp, REMOTE)
    remote_spec = source[Rank(0, 0)][0]
    made.register_remote_ranks(remote_spec, {r: held[1] for r, held in source.items()})
    return made


def info(made: TransferTopology) -> MambaEngineTransferInfo:
    """Return the registered facts of stage 0."""
    facts = made.get_engine_info(REMOTE)
    assert isinstance(facts, MambaEngineTransferInfo)
    return facts


@pytest.mark.parametrize(
    ("tp", "remote_tp", "heads", "attention", "every", "reads"),
    [
        (2, 8, 4, [[0, 2], [4, 6]], [[0, 1, 2, 3], [4, 5, 6, 7]], (2, 4)),
        (2, 4, 8, [[0, 1], [2, 3]], [[0, 1], [2, 3]], (2, 2)),
        (4, 8, 2, [[0], [2], [4], [6]], [[0, 1], [2, 3], [4, 5], [6, 7]], (1, 2)),
        (1, 8, 2, [[0, 4]], [[0, 1, 2, 3, 4, 5, 6, 7]], (2, 8)),
        (4, 2, 8, [[0], [0], [1], [1]], [[0], [0], [1], [1]], (1, 1)),  # L >= R
        (2, 2, 4, [[0], [1]], [[0], [1]], (1, 1)),
        (2, 4, 0, [[0], [2]], [[0, 1], [2, 3]], (1, 2)),  # MLA: rank 1 reads attention from 2, not 0
    ],
)
def test_sources_and_reads(
    tp: int,
    remote_tp: int,
    heads: int,
    *,
    attention: list[list[int]],
    every: list[list[int]],
    reads: tuple[int, int],
) -> None:
    """GOLDEN row 4, rank by rank."""
    for rank in range(tp):
        facts = info(topology(tp, rank, remote_tp, heads))
        assert list(facts.remote_fa_source_ranks) == attention[rank]
        assert list(facts.remote_all_source_ranks) == every[rank]
        assert (facts.remote_num_fa_reads, facts.remote_num_mamba_reads) == reads
        assert set(facts.remote_fa_source_ranks) <= set(facts.remote_all_source_ranks)
        assert facts.is_remote_replicated is (0 < heads < remote_tp)
        assert facts.remote_physical_heads == (max(1, heads // remote_tp) if heads else 1)


def test_skipping_slots_and_splitting() -> None:
    """GOLDEN row 5: L2, R8, K4, r0, remote ranks 0 to 3."""
    made = topology(2, 0, 8, 4)
    assert [made.should_skip_fa(REMOTE, rank) for rank in range(4)] == [False, True, False, True]
    assert [made.fa_head_slot(REMOTE, rank) for rank in range(4)] == [0, 0, 1, 1]
    assert made.needs_split_handles(REMOTE)
    assert not topology(4, 1, 2, 8).needs_split_handles(REMOTE)  # L >= R
    assert not topology(2, 1, 4, 0).needs_split_handles(REMOTE)  # MLA


def test_filtering_block_ids() -> None:
    """GOLDEN row 5: groups [attention, state]."""
    made = topology(2, 0, 8, 4)
    groups = {"local": [[5, 6], [9]], "remote": [[1, 2], [3]], "is_state_group": [False, True]}
    assert made.filter_block_ids_for_rank(REMOTE, 1, **groups) == ([[], [9]], [[], [3]])
    assert made.filter_block_ids_for_rank(REMOTE, 2, **groups) == ([[5, 6], [9]], [[1, 2], [3]])


def test_an_engine_without_states_is_told_so() -> None:
    """By name, never an assertion: checks for one kind do not run on models that lack it."""
    plain = ModelFacts("plain", 4, (LayerKind.FULL,), key_and_value(4, 4))
    made = TransferTopology(*deploy(plain, tp=1)[Rank(0, 0)])
    source = deploy(plain, tp=2, engine_id=REMOTE)
    made.register_remote_ranks(source[Rank(0, 0)][0], {r: held[1] for r, held in source.items()})
    with pytest.raises(EngineError, match="engine 'remote', stage 0: this rank reads no states") as caught:
        made.filter_block_ids_for_rank(REMOTE, 1, local=[], remote=[], is_state_group=[])
    assert caught.value.code is Code.LAYOUT_INCOMPATIBLE
    assert not isinstance(made.get_engine_info(REMOTE), MambaEngineTransferInfo)
    assert "fa_reads" not in made.describe(REMOTE)


@pytest.mark.parametrize(
    ("tp", "remote_tp", "heads", "want"),
    [
        (8, 2, 4, [0, 0, 1, 1, 0, 0, 1, 1]),
        (4, 2, 8, [0, 1, 0, 1]),
        (8, 4, 2, [0] * 8),
        (2, 8, 4, [0, 0]),  # L < R
        (2, 3, 6, [0, 0]),  # L < R, though the first read of rank 1 begins inside a remote block
        (4, 2, 0, [0] * 4),  # MLA
    ],
)
def test_offset_of_our_heads_in_a_remote_block(tp: int, remote_tp: int, heads: int, want: list[int]) -> None:
    """GOLDEN row 6: in lengths of what is read."""
    offsets = [topology(tp, rank, remote_tp, heads).fa_rank_offset(REMOTE, 4096) for rank in range(tp)]
    assert [offset // 4096 for offset in offsets] == want


@pytest.mark.parametrize(
    ("is_blocks_first", "want"),
    [(True, 4096), (False, 8192)],
)
def test_attention_descriptor_bytes(is_blocks_first: bool, want: int) -> None:
    """GOLDEN row 7: local block 16384, remote 8192."""
    assert attention_descriptor_bytes(16384, 8192, is_blocks_first=is_blocks_first) == want


def test_halves_must_fit() -> None:
    """GOLDEN row 7: L2, R8, K4, two reads into one block; what upstream only logs is refused."""
    assert attention_descriptor_bytes(16384, 8192, is_blocks_first=True, num_reads=2) == 4096
    with pytest.raises(PlanError, match="6144 bytes, and 4096 are needed") as caught:
        attention_descriptor_bytes(16384, 12288, is_blocks_first=True, num_reads=2)
    assert caught.value.code is Code.LAYOUT_INCOMPATIBLE


@pytest.mark.parametrize(
    ("block_tokens", "layout", "page_bytes"),
    [(4, "HND", 0), (4, "NHD", 0), (4, "HND", 4096), (4, "HND-packed", 0), (2, "HND", 0), (16, "NHD", 0)],
)
@pytest.mark.parametrize("is_by_hand", [False, True])
def test_descriptors_between_blocks_that_differ(
    block_tokens: int, layout: str, page_bytes: int, is_by_hand: bool
) -> None:
    """L2, R8, K4: one of two heads of the smaller block, however the remote's pages lie."""
    source = deploy(
        hybrid(4),
        tp=8,
        num_blocks=8,
        engine_id=REMOTE,
        block_tokens=block_tokens,
        layout=layout,
        page_bytes=page_bytes,
    )
    layouts = {rank: held[1] for rank, held in source.items()}
    made = TransferTopology(*engine(2, 4)[Rank(0, 0)])
    if is_by_hand:
        made.register_remote_engine(REMOTE, stage_infos(source[Rank(0, 0)][0], layouts)[0])
    else:
        made.register_remote_ranks(source[Rank(0, 0)][0], layouts)
    assert info(made).remote_fa_descriptor_bytes == min(4, block_tokens) * 4 * 2


@pytest.mark.parametrize("remote_tp", range(1, 6))
def test_states_that_divide_unevenly(remote_tp: int) -> None:
    """5 heads on 2 ranks, by facts alone: rank 1 begins at 3 and holds 2, so there are 5."""
    states = (StateComponent("ssm", 5, 8),)
    model = ModelFacts("uneven", 0, (LayerKind.STATE,), (), states)
    source = deploy(model, tp=remote_tp, num_blocks=2, engine_id=REMOTE)
    layouts = {rank: held[1] for rank, held in source.items()}
    own = deploy(model, tp=2, num_blocks=2, engine_id="local")[Rank(0, 1)]
    planned, by_hand = TransferTopology(*own), TransferTopology(*own)
    planned.register_remote_ranks(source[Rank(0, 0)][0], layouts)
    by_hand.register_remote_engine(REMOTE, stage_infos(source[Rank(0, 0)][0], layouts)[0])
    assert info(by_hand) == info(planned)


def test_states_that_every_rank_holds() -> None:
    """Rank 1 of 2 holds what begins at 0, as rank 0 does: it is read from one remote rank."""
    own, layout = deploy(hybrid(4), tp=1, num_blocks=8, block_tokens=4, engine_id="local")[Rank(0, 0)]
    made = TransferTopology(msgspec.structs.replace(own, tp_size=2, tp_rank=1), layout)
    made.register_remote_engine(REMOTE, EngineTransferInfo(8, 1024, 4, end_layer=1))
    assert info(made).remote_all_source_ranks == (4,)


def test_split_descriptors() -> None:
    """GOLDEN row 7: L1, R4, K2."""
    made = topology(1, 0, 4, 2)
    attention = [(65536, 4096), (69632, 4096)]
    states = [(131072, 1200), (196608, 8192)]
    assert made.compute_split_handle_data(REMOTE, attention, states) == {
        0: [(65536, 2048), (69632, 2048), (131072, 300), (196608, 2048)],
        1: [(131372, 300), (198656, 2048)],
        2: [(67584, 2048), (71680, 2048), (131672, 300), (200704, 2048)],
        3: [(131972, 300), (202752, 2048)],
    }
    with pytest.raises(PlanError, match="1201 bytes into 4"):
        made.compute_split_handle_data(REMOTE, [], [(0, 1201)])


def test_stages_with_one_kind_only() -> None:
    """Stage 0 has the state layer, stage 1 the attention layer."""
    made = topology(2, 0, 4, 4, remote_pp=2)
    first, second = made.get_engine_info(REMOTE, 0), made.get_engine_info(REMOTE, 1)
    assert isinstance(first, MambaEngineTransferInfo)
    assert (first.remote_fa_source_ranks, first.remote_all_source_ranks) == ((), (0, 1))
    assert (first.remote_fa_descriptor_bytes, first.remote_num_mamba_reads) == (0, 2)
    assert (first.start_layer, first.end_layer) == (0, 1)
    assert not isinstance(second, MambaEngineTransferInfo)
    assert made.target_remote_ranks(REMOTE, 1) == [0, 1]
    with pytest.raises(EngineError, match="stage 1: this rank reads no states"):
        made.should_skip_fa(REMOTE, 0, 1)


class Manifest:
    """A manifest as fetched: it alone keeps its layouts."""

    def __init__(self, ranks: dict[Rank, RankLayout]) -> None:
        self.ranks = ranks

    def layouts(self) -> dict[Rank, RankLayout]:
        return self.ranks


@pytest.mark.parametrize(("tp", "remote_tp", "heads"), [(2, 8, 4), (4, 2, 8), (2, 4, 8), (1, 2, 4)])
def test_a_forgotten_manifest_takes_no_answers(tp: int, remote_tp: int, heads: int) -> None:
    """What a stage of states is read for is kept with the facts, without the layouts."""
    local, source = engine(tp, heads), engine(remote_tp, heads, 1, REMOTE)
    own = TransferTopology(*local[Rank(0, 0)])
    manifest, plans = Manifest({r: held[1] for r, held in source.items()}), PlanCache(max_plans=1)
    own.register_remote_ranks(
        source[Rank(0, 0)][0], manifest.ranks, manifest=weakref.ref(manifest), plans=plans
    )
    alike = topology(tp, 0, remote_tp, heads)
    freed = weakref.ref(manifest)
    other = engine(remote_tp, heads, 1, "other")
    plans.get(*other[Rank(0, 0)], other[Rank(0, 0)][0], {rank: held[1] for rank, held in other.items()})
    del manifest
    gc.collect()
    assert freed() is None
    assert own.find(REMOTE).plan is None
    for rank in range(remote_tp):
        assert own.should_skip_fa(REMOTE, rank) is alike.should_skip_fa(REMOTE, rank)
        assert own.fa_head_slot(REMOTE, rank) == alike.fa_head_slot(REMOTE, rank)
    assert own.fa_rank_offset(REMOTE, 64) == alike.fa_rank_offset(REMOTE, 64)
    assert own.needs_split_handles(REMOTE) is alike.needs_split_handles(REMOTE)
    parts = [(4096, 960)], [(9000, 960)]
    assert own.compute_split_handle_data(REMOTE, *parts) == alike.compute_split_handle_data(REMOTE, *parts)


def test_describing_a_hybrid() -> None:
    """One line with reads and sources of both kinds."""
    line = topology(2, 0, 8, 4).describe(REMOTE)
    for words in (
        "tp_ratio=-4",
        "fa_reads=2",
        "mamba_reads=4",
        "fa_sources=[0, 2]",
        "all_sources=[0, 1, 2, 3]",
    ):
        assert words in line
    assert "\n" not in line


def test_what_is_kept_of_a_hybrid_counts() -> None:
    """A peer may divide its heads among ranks as finely as it likes."""
    assert topology(2, 0, 8, 4).find(REMOTE).num_parts == 8 + 1 + (8 + 8 + 2)  # two of eight ranks are read
    assert topology(1, 0, 1, 4).find(REMOTE).num_parts == 1 + 1 + (1 + 1 + 1)
