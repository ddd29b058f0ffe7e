"""An engine that is registered by its facts alone gives the answers of one whose layouts are known."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxferd.ids import EngineId, Generation, Rank
from kvxferd.layout import EngineSpec, GroupKind, RankLayout
from kvxferd.layout.presets import LayerKind, ModelFacts, TokenComponent, deploy
from kvxferd.layout.presets.model_facts import (
    gdn_states,
    key_and_value,
    mamba1_states,
    mamba2_states,
)
from kvxferd.plan import (
    EngineTransferInfo,
    MambaEngineTransferInfo,
    TransferTopology,
    attention_descriptor_bytes,
    stage_infos,
)

REMOTE = EngineId("remote")
FULL, STATE = LayerKind.FULL, LayerKind.STATE
LATENT = ((TokenComponent("latent", 1, 8, is_replicated=True),),)
ARRANGEMENTS = ("HND-blocks-first", "NHD-blocks-first", "HND-packed", "HND+SD")

Ranks = dict[Rank, tuple[EngineSpec, RankLayout]]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Ranks, Ranks]:
    """Two deployments of one model that an engine with states can have: each part divides, or is copied."""
    kinds = draw(st.sampled_from([(STATE, FULL, STATE), (FULL, STATE), (STATE, STATE), (FULL, FULL)]))
    heads = draw(st.integers(0, 16)) if FULL in kinds else 0
    tokens = (key_and_value(heads, 4) if heads else LATENT) if FULL in kinds else ()
    num_heads = draw(st.sampled_from([12, 16, 24, 48]))
    groups = draw(st.sampled_from([g for g in (0, 1, 2, 4, 6, 8, 12, 16) if g <= num_heads]))
    states = {
        "mamba2": mamba2_states(num_heads, 2, groups, 2),
        "mamba1": mamba1_states(num_heads, 2),
        "gdn": gdn_states(groups or 4, 2, num_heads, 2),
    }[draw(st.sampled_from(["mamba2", "mamba1", "gdn"]))]
    model = ModelFacts("random", heads, kinds, tokens, states if STATE in kinds else ())
    sizes = [tp for tp in range(1, 17) if all(_divides(s.num_units, tp) for s in model.states)]
    deployments = [
        deploy(
            model,
            tp=draw(st.sampled_from(sizes)),
            pp=draw(st.integers(1, len(kinds))),
            block_tokens=draw(st.sampled_from([2, 4, 8])),
            layout=draw(st.sampled_from(ARRANGEMENTS)),
            page_bytes=draw(st.sampled_from([0, 0, 512])),
            num_blocks=4,
            engine_id=engine_id,
        )
        for engine_id in ("local", REMOTE)
    ]
    return deployments[0], deployments[1]


def _divides(num_units: int, tp: int) -> bool:
    return num_units == 0 or num_units % tp == 0 or tp % num_units == 0


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(pair=pairs(), data=st.data())
def test_facts_alone_agree_with_the_plan(pair: tuple[Ranks, Ranks], data: st.DataObject) -> None:
    """Info, ranks, slots, offsets and split descriptors, for a random rank of a random pair."""
    sink, source = pair
    own, layout = sink[data.draw(st.sampled_from(sorted(sink)))]
    planned, by_hand = TransferTopology(own, layout), TransferTopology(own, layout)
    remote_spec = source[Rank(0, 0)][0]
    layouts = {rank: held[1] for rank, held in source.items()}
    plan = planned.register_remote_ranks(remote_spec, layouts)
    for stage, info in stage_infos(remote_spec, layouts).items():
        facts = by_hand.register_remote_engine(REMOTE, info, remote_spec.generation)
        assert facts == planned.get_engine_info(REMOTE, stage)
        assert facts is by_hand.register_remote_engine(REMOTE, info, remote_spec.generation)  # idempotent
        assert facts is by_hand.register_remote_engine(REMOTE, facts, remote_spec.generation)
        read = sorted({rank.tp_rank for rank in plan.sources if rank.pp_rank == stage})
        assert by_hand.target_remote_ranks(REMOTE, stage) == read
        assert by_hand.describe(REMOTE, stage) == planned.describe(REMOTE, stage)
        kinds = {r.local.kind for r in plan.group_reads if r.rank.pp_rank == stage}
        assert isinstance(facts, MambaEngineTransferInfo) is (GroupKind.STATE in kinds)
        if not isinstance(facts, MambaEngineTransferInfo):
            continue
        mine, theirs = by_hand.hybrid(REMOTE, stage), planned.hybrid(REMOTE, stage)
        assert mine.state_source_ranks == theirs.state_source_ranks
        assert mine.needs_split_handles() == theirs.needs_split_handles()
        assert mine.fa_rank_offset(4096) == theirs.fa_rank_offset(4096)
        for rank in range(facts.remote_tp_size):
            assert mine.should_skip_fa(rank) == theirs.should_skip_fa(rank)
            assert mine.fa_head_slot(rank) == theirs.fa_head_slot(rank)
        whole = 720720  # every number of ranks and heads up to 16 divides it
        cut = mine.compute_split_handle_data([(0, whole)], [(0, whole)])
        assert cut == theirs.compute_split_handle_data([(0, whole)], [(0, whole)])


@settings(max_examples=150, deadline=None)
@given(
    heads=st.sampled_from([1, 2, 4, 8, 16]),
    sizes=st.tuples(*[st.sampled_from([1, 2, 4, 8, 16])] * 2),
    data=st.data(),
)
def test_descriptors_are_those_of_in_engine_connectors(
    heads: int, sizes: tuple[int, int], data: st.DataObject
) -> None:
    """GOLDEN row 7's arithmetic, wherever it holds: equal blocks without padding, heads that divide."""
    model = ModelFacts("hybrid", heads, (STATE, FULL), key_and_value(heads, 4), mamba2_states(16, 2, 8, 2))
    layout = data.draw(st.sampled_from(["HND-blocks-first", "NHD-blocks-first"]))
    sink, source = (
        deploy(model, tp=tp, num_blocks=2, block_tokens=4, layout=layout, engine_id=name)
        for tp, name in zip(sizes, ("local", REMOTE), strict=True)
    )
    made = TransferTopology(*sink[Rank(0, data.draw(st.integers(0, sizes[0] - 1)))])
    made.register_remote_ranks(source[Rank(0, 0)][0], {rank: held[1] for rank, held in source.items()})
    facts = made.get_engine_info(REMOTE)
    assert isinstance(facts, MambaEngineTransferInfo)
    own_block = next(t.block_stride for t in made.layout.tensors if t.component == "k")
    assert facts.remote_fa_descriptor_bytes == attention_descriptor_bytes(
        own_block, facts.remote_block_len, is_blocks_first=True, num_reads=facts.remote_num_fa_reads
    )


def test_layers_decide_what_is_read() -> None:
    """Facts of two stages by hand: the first has the states, the second the attention."""
    model = ModelFacts("hybrid", 4, (STATE, FULL), key_and_value(4, 4), mamba2_states(16, 2, 8, 2))
    made = TransferTopology(*deploy(model, tp=2, num_blocks=2, engine_id="local")[Rank(0, 1)])
    whole = EngineTransferInfo(8, 1024, 16)
    first = made.register_remote_engine(EngineId("stages"), dataclasses.replace(whole, end_layer=1))
    second = made.register_remote_engine(
        EngineId("stages"), dataclasses.replace(whole, remote_pp_rank=1, start_layer=1, end_layer=2)
    )
    assert isinstance(first, MambaEngineTransferInfo)
    assert (first.remote_fa_source_ranks, first.remote_all_source_ranks) == ((), (4, 5, 6, 7))
    assert type(second) is EngineTransferInfo
    assert made.target_remote_ranks(EngineId("stages"), 1) == [4, 6]
    # without layers it is the whole model
    both = made.register_remote_engine(EngineId("whole"), whole, Generation("a"))
    assert isinstance(both, MambaEngineTransferInfo)
    assert (both.remote_fa_source_ranks, both.remote_all_source_ranks) == ((4, 6), (4, 5, 6, 7))
