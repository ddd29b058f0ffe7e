"""Hybrids in the field's words, pinned to the golden numbers (rows 4 to 7)."""

from __future__ import annotations

import pytest

from kvxferd.errors import Code, PlanError
from kvxferd.explain.byte_ranges import byte_ranges
from kvxferd.ids import EngineId, GroupName, Rank
from kvxferd.layout import (
    EngineSpec,
    GroupKind,
    RankLayout,
)
from kvxferd.layout.presets import LayerKind, ModelFacts, StateComponent, TokenComponent, deploy
from kvxferd.layout.presets.model_facts import key_and_value, mamba2_states
from kvxferd.plan import MambaEngineTransferInfo, Plan, TransferTopology
from tests.support.attention_engines import plan_between
from tests.support.fetched_engine import register

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
    register(made, engine(remote_tp, heads, remote_pp, REMOTE))
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
        assert facts.remote_physical_heads == (max(1, heads // remote_tp) if heads else 1)


def test_skipping_slots_and_splitting() -> None:
    """GOLDEN row 5: L2, R8, K4, r0, remote ranks 0 to 3."""
    facts = info(topology(2, 0, 8, 4))
    assert [facts.should_skip_fa(rank) for rank in range(4)] == [False, True, False, True]
    assert [facts.fa_head_slot(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert facts.needs_split_handles
    assert not info(topology(4, 1, 2, 8)).needs_split_handles  # L >= R
    assert not info(topology(2, 1, 4, 0)).needs_split_handles  # MLA


def test_block_ids_of_a_rank_that_is_read_for_states_alone() -> None:
    """GOLDEN row 5: groups [attention, state], local [[5, 6], [9]], remote [[1, 2], [3]].

    Of rank 1 the plan reads [[], [9]] from [[], [3]]; of rank 2 all of them.
    """
    sink, source = (
        deploy(hybrid(4), tp=tp, block_tokens=4, num_blocks=10, shared_pages=False) for tp in (2, 8)
    )
    plan = plan_between(sink, source)
    local = {"full": [5, 6], "state.0": [9]}
    remote = {"full": [1, 2], "state.0": [3]}
    for rank, want in ((1, [([], []), ([9], [3])]), (2, [([5, 6], [1, 2]), ([9], [3])])):
        read = {one.local.group: one.remote.group for one in plan.group_reads if one.rank.tp_rank == rank}
        found = [(local[n], remote[read[GroupName(n)]]) if n in read else ([], []) for n in local]
        assert found == want


@pytest.mark.parametrize(
    ("tp", "remote_tp", "heads", "want"),
    [
        (8, 2, 4, [0, 0, 1, 1, 0, 0, 1, 1]),
        (4, 2, 8, [0, 1, 0, 1]),
        (8, 4, 2, [0] * 8),
        (2, 8, 4, [0, 0]),  # L < R
        (4, 2, 0, [0] * 4),  # MLA
    ],
)
def test_offset_of_our_heads_in_a_remote_block(tp: int, remote_tp: int, heads: int, want: list[int]) -> None:
    """GOLDEN row 6: in lengths of what is read."""
    sink, source = engine(tp, heads), engine(remote_tp, heads)
    assert [first_offset(plan_between(sink, source, (0, rank)), source) for rank in range(tp)] == want


def first_offset(plan: Plan, source: dict[Rank, tuple[EngineSpec, RankLayout]]) -> int:
    """Return where the first heads that are read begin in a remote tensor's block, in lengths of the read."""
    first = next(r for r in byte_ranges(plan) if r.kind is GroupKind.ATTENTION)
    tensor = next(
        t
        for t in source[first.remote_rank][1].tensors
        if (t.layer, t.component) == (first.layer, first.component)
    )
    _, remote_offset, length = first.runs[0]
    return (remote_offset - tensor.offset) // length


@pytest.mark.parametrize(("layout", "want"), [("HND-blocks-first", 4096), ("HND", 8192)])
def test_attention_descriptor_bytes(layout: str, want: int) -> None:
    """GOLDEN row 7: local block 16384, remote 8192, which L2, R8, K4 read in two halves."""
    heads = key_and_value(4, want // 32)  # a head of a block of 16 tokens has `want` bytes
    kinds = (LayerKind.STATE, LayerKind.FULL)
    options = {"block_tokens": 16, "layout": layout, "num_blocks": 2, "shared_pages": False}
    model = ModelFacts("hybrid", 4, kinds, heads, STATES)
    made = TransferTopology(*deploy(model, tp=2, engine_id="local", **options)[Rank(0, 0)])
    register(made, deploy(model, tp=8, engine_id=REMOTE, **options))
    assert made.layout.tensors[0].block_stride == 16384
    assert info(made).remote_block_len == 8192
    assert info(made).remote_fa_descriptor_bytes == want
    assert info(made).remote_num_fa_reads == 2


def test_halves_must_fit() -> None:
    """GOLDEN row 7: a remote block of 12288 bytes, 6144 of them K, where 4096 are needed."""
    sink, source = (
        deploy(ModelFacts("halves", 4, (LayerKind.FULL,), key_and_value(4, head_dim)), tp=tp, block_tokens=16)
        for tp, head_dim in ((2, 128), (8, 192))
    )
    with pytest.raises(PlanError, match="content_bytes") as caught:
        plan_between(sink, source)
    assert caught.value.code is Code.LAYOUT_INCOMPATIBLE


def test_split_descriptors() -> None:
    """GOLDEN row 7: L1, R4, K2; attention of 4096 bytes, states of 1200 and 8192."""
    model = ModelFacts(
        "split",
        2,
        (LayerKind.STATE, LayerKind.FULL),
        key_and_value(2, 64),  # 2048 bytes of a head in a block of 16 tokens
        (StateComponent("conv", 4, 300, itemsize=1), StateComponent("ssm", 4, 2048, itemsize=1)),
    )
    options = {"block_tokens": 16, "num_blocks": 2, "shared_pages": False}
    sink, source = (deploy(model, tp=tp, **options) for tp in (1, 4))
    layout = sink[Rank(0, 0)][1]
    starts = {(t.layer, t.component): t.offset for t in layout.tensors}
    # Where the field's example has them.
    addresses = {"k": 65536, "v": 69632, "conv": 131072, "ssm": 196608}
    split: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(4)}
    found = byte_ranges(plan_between(sink, source))
    for ranges in sorted(found, key=lambda r: list(addresses).index(r.component)):
        ((local, _, length),) = ranges.runs
        inside = local - starts[ranges.layer, ranges.component]
        split[ranges.remote_rank.tp_rank].append((addresses[ranges.component] + inside, length))
    assert split == {
        0: [(65536, 2048), (69632, 2048), (131072, 300), (196608, 2048)],
        1: [(131372, 300), (198656, 2048)],
        2: [(67584, 2048), (71680, 2048), (131672, 300), (200704, 2048)],
        3: [(131972, 300), (202752, 2048)],
    }


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
