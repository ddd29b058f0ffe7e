"""What is shown of remote engines: the golden deployments, and every byte of a block filled once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvxferd.core.topology_builder import BATCH, list_topologies, topology_steps
from kvxferd.core.topology_snapshot import SplitPartSnapshot, StageSnapshot, TopologySnapshot
from kvxferd.errors import Code, EngineError, PlanError
from kvxferd.ids import EngineId, Rank
from kvxferd.layout import CacheTensor, Group, GroupKind, RankLayout, UnitRange
from kvxferd.layout.presets import LayerKind, ModelFacts, deploy
from kvxferd.layout.presets.model_facts import key_and_value, mamba2_states
from kvxferd.plan import TransferTopology, plan_reads
from kvxferd.wire import worker as wk
from tests.support.layout_strategies import engines, models
from tests.support.simulation import World
from tests.support.topology_samples import FIRST, HOME, REMOTE, RegisteredPair, registered, shown

STATES = mamba2_states(num_heads=16, head_dim=2, num_groups=8, state_size=2)


def hybrid(heads: int) -> ModelFacts:
    """One state layer, one attention layer."""
    return ModelFacts("hybrid", heads, (LayerKind.STATE, LayerKind.FULL), key_and_value(heads, 4), STATES)


def only_stage(pair: RegisteredPair) -> StageSnapshot:
    (stage,) = shown(pair).stages
    return stage


@pytest.mark.parametrize(
    ("tp", "remote_tp", "heads", "slots", "attention", "states"),
    [
        (2, 8, 4, {0: 0, 2: 1}, [0, 2], [0, 1, 2, 3]),
        (2, 4, 8, {0: 0, 1: 1}, [0, 1], [0, 1]),
        (4, 8, 2, {0: 0}, [0], [0, 1]),
        (1, 8, 2, {0: 0, 4: 1}, [0, 4], list(range(8))),
        (4, 2, 8, {0: 0}, [0], [0]),  # L >= R
    ],
)
def test_a_hybrid_is_read_by_kind(
    tp: int,
    remote_tp: int,
    heads: int,
    *,
    slots: dict[int, int],
    attention: list[int],
    states: list[int],
) -> None:
    """GOLDEN rows 4 and 5, rank 0."""
    pair = registered(hybrid(heads), tp, remote_tp)
    stage = only_stage(pair)
    assert stage.fa_head_slots == slots
    for rank, slot in slots.items():
        assert pair.topology.fa_head_slot(REMOTE, rank) == slot
    assert [r.remote_rank for r in stage.reads if r.kind is GroupKind.ATTENTION] == attention
    assert [r.remote_rank for r in stage.reads if r.kind is GroupKind.STATE] == states
    assert list(stage.target_remote_ranks) == states
    assert [split.remote_rank for split in stage.splits] == states
    assert stage.info["remote_fa_source_ranks"] == tuple(attention)
    assert stage.info["remote_num_mamba_reads"] == len(states)
    assert stage.is_kv_replicated is (heads < remote_tp)


def test_split_descriptors_agree_with_the_connectors_own() -> None:
    """GOLDEN row 7, L1, R4, K2: each region's part of block 0, as `compute_split_handle_data` divides it."""
    pair = registered(hybrid(2), 1, 4)
    stage = only_stage(pair)
    descriptors = {
        kind: [(r.offset, r.kv_block_len) for r in stage.regions if r.kind is kind] for kind in GroupKind
    }
    want = pair.topology.compute_split_handle_data(
        REMOTE, descriptors[GroupKind.ATTENTION], descriptors[GroupKind.STATE]
    )
    starts = {(r.layer, r.component): r.offset for r in stage.regions}
    for split in stage.splits:
        parts = [
            (starts[layer, part.component] + part.offset, part.length)
            for part in split.parts
            for layer in part.layers
        ]
        assert all(part.counts == () for part in split.parts)
        assert sorted(parts) == sorted(want[split.remote_rank])
    assert [split.remote_rank for split in stage.splits] == sorted(want)


def test_regions_of_a_large_hybrid() -> None:
    """GOLDEN row 8: Nemotron-H-8B at TP4 has 104 regions; the states' offsets and lengths."""
    stage = only_stage(registered("nemotron-h-8b", 4, 1, Rank(0, 3)))
    assert len(stage.regions) == 104
    first = {r.component: r for r in stage.regions if r.layer == stage.regions[0].layer}
    assert [(r.offset, r.kv_block_len) for r in first.values()] == [
        (0, 12288),
        (12288, 1536),
        (13824, 1536),
        (15360, 524288),
    ]
    assert list(first) == ["conv.x", "conv.B", "conv.C", "ssm"]
    assert {r.kind for r in first.values()} == {GroupKind.STATE}
    assert sum(r.kind is GroupKind.ATTENTION for r in stage.regions) == 8
    (split,) = stage.splits
    assert [(p.component, p.offset, p.length) for p in split.parts if p.kind is GroupKind.STATE] == [
        ("conv.x", 0, 12288),
        ("conv.B", 0, 1536),
        ("conv.C", 0, 1536),
        ("ssm", 0, 524288),
    ]


def test_an_engine_without_heads() -> None:
    """MLA, L2, R4, rank 1: replicated, though not by heads, and read from rank 2 alone."""
    stage = only_stage(registered("tiny-mla", 2, 4, Rank(0, 1)))
    assert (stage.is_kv_replicated, stage.replicates_kv_cache) == (False, True)
    assert (stage.handshake_target_ranks, stage.target_remote_ranks) == ((2, 3), (2,))
    assert stage.fa_head_slots is None
    assert stage.tp_ratio == -2
    assert "remote_fa_source_ranks" not in stage.info


def test_sizes_that_do_not_divide_have_no_ratio() -> None:
    """TP 3 and 2, blocks of 16 and 24 tokens, two stages; rank 1 holds heads of both remote ranks."""
    pair = registered("tiny-dense", 3, 2, Rank(0, 1), local={"block_tokens": 16},
                      remote={"pp": 2, "block_tokens": 24})  # fmt: skip
    topology = shown(pair)
    assert [(s.tp_ratio, s.block_size_ratio) for s in topology.stages] == [(None, None)] * 2
    assert [s.handshake_target_ranks for s in topology.stages] == [(0, 1)] * 2
    for pp_rank, stage in enumerate(topology.stages):
        start, end = stage.info["start_layer"], stage.info["end_layer"]
        assert stage.info["remote_pp_rank"] == pp_rank
        assert sorted({r.layer for r in stage.regions}) == list(range(start, end))
        assert {layer for read in stage.reads for layer in read.layers} == set(range(start, end))
    assert topology.stages[0].info["end_layer"] == topology.stages[1].info["start_layer"]


def test_reads_are_those_of_the_plan() -> None:
    pair = registered("tiny-gdn", 1, 2, remote={"pp": 2})
    plan = pair.topology.find(REMOTE).plan
    assert plan is not None
    want = [
        (r.source, r.kind, r.layers, r.units, r.bytes_per_token, r.bytes_per_state) for r in plan_reads(plan)
    ]
    assert want == [
        (
            Rank(stage.info["remote_pp_rank"], r.remote_rank),
            r.kind,
            r.layers,
            r.units,
            r.bytes_per_token,
            r.bytes_per_state,
        )
        for stage in shown(pair).stages
        for r in stage.reads
    ]


def test_who_reads_whom_and_when_it_was_last_used() -> None:
    topology = shown(registered("tiny-dense", 2, 1, Rank(0, 1)), now=112.5)
    assert (topology.local_engine_id, topology.local_rank) == ("decode-0", Rank(0, 1))
    assert (topology.engine_id, topology.home, topology.generation) == (REMOTE, HOME, "preset")
    assert topology.last_used_s == 12.5


def test_a_use_between_two_steps_is_not_in_the_future() -> None:
    assert shown(registered("tiny-dense", 2, 1), now=99.0).last_used_s == 0.0


def test_an_evicted_plan_is_shown_as_such() -> None:
    """What came from the plan is left out, not guessed; facts and ratios stay."""
    pair = registered(hybrid(8), 2, 4)
    before = shown(pair)
    kept = pair.topology.find(REMOTE).kept
    assert kept is not None
    kept.plan = None
    after = shown(pair)
    assert (before.is_plan_kept, after.is_plan_kept) == (True, False)
    assert after.stages == tuple(replace(stage, splits=(), reads=()) for stage in before.stages)


# --- every byte of a block


def bytes_of_part(part: SplitPartSnapshot) -> Iterator[int]:
    steps = [
        range(0, count * stride, stride) for count, stride in zip(part.counts, part.strides, strict=True)
    ]
    for step in itertools.product(*steps):
        start = part.offset + sum(step)
        yield from range(start, start + part.length)


def bytes_of_units(tensor: CacheTensor, group: Group, units: UnitRange) -> set[int]:
    """The bytes of these units in block 0, from the definition of a cache tensor, from its first byte on."""
    num_items = 1
    if group.kind is GroupKind.ATTENTION:
        num_items = group.block_tokens // group.physical_blocks_per_logical // tensor.granule_tokens
    held = [unit for some in tensor.units for unit in range(some.start, some.stop)]
    return {
        item * tensor.token_stride
        + held.index(unit) * tensor.unit_stride
        + chunk * tensor.chunk_stride
        + byte
        for item in range(num_items)
        for unit in range(units.start, units.stop)
        for chunk in range(tensor.num_chunks)
        for byte in range(tensor.chunk_bytes)
    }


def check_splits(layout: RankLayout, topology: TopologySnapshot, num_shards: int) -> None:
    """Each part has the bytes of its units; a region's have all, each once without context parallelism."""
    groups = {group.name: group for group in layout.groups}
    held = {(t.layer, t.component): t for t in layout.tensors if t.num_units}
    filled: dict[tuple[int, str], Counter[int]] = {key: Counter() for key in held}
    every_part = [part for stage in topology.stages for split in stage.splits for part in split.parts]
    for part, layer in ((one, layer) for one in every_part for layer in one.layers):
        tensor = held[layer, part.component]
        found = list(bytes_of_part(part))
        want = bytes_of_units(tensor, groups[tensor.group], part.units)
        assert len(found) == len(want)
        assert set(found) == want
        filled[layer, part.component].update(found)
    regions = {(r.layer, r.component): r for stage in topology.stages for r in stage.regions}
    for key, tensor in held.items():
        group = groups[tensor.group]
        every = set().union(*(bytes_of_units(tensor, group, units) for units in tensor.units))
        assert set(filled[key]) == every
        if group.kind is GroupKind.STATE or num_shards == 1:
            assert max(filled[key].values()) == 1
        assert regions[key].kv_block_len == len(every)
        assert (regions[key].offset, regions[key].block_len) == (tensor.offset, tensor.block_stride)


@pytest.mark.slow
@given(st.data())
def test_splits_fill_each_block_of_any_layout(data: st.DataObject) -> None:
    """Any pair of deployments: shared pages, chunks, axis orders, stages, replicas, context parallelism."""
    model = data.draw(models())
    local, remote = data.draw(engines(model, "local")), data.draw(engines(model, "remote"))
    rank = data.draw(st.sampled_from(sorted(local.ranks)))
    topology = TransferTopology(local.spec_of(rank), local.ranks[rank])
    try:
        topology.register_remote_ranks(remote.spec, remote.ranks)
    except PlanError:
        assume(False)
    pair = RegisteredPair(topology, remote.spec, remote.ranks)
    shards = {group.token_shard.count for engine in (local, remote) for group in engine.group_facts.values()}
    check_splits(local.ranks[rank], shown(pair), max(shards, default=1))


@pytest.mark.parametrize(
    ("layout", "runs"),
    [
        ("HND", [(0, 16 * 2 * 16, (), ())]),  # two heads of 16 tokens of 16 bytes
        ("NHD", [(0, 2 * 16, (16,), (4 * 16,))]),  # two of four heads, token by token
    ],
)
def test_a_part_is_as_few_runs_as_it_can_be(layout: str, runs: list[tuple[object, ...]]) -> None:
    """Four heads of 16 bytes on one rank, two from each of two."""
    model = ModelFacts("plain", 4, (LayerKind.FULL,), key_and_value(4, 8))
    stage = only_stage(registered(model, 1, 2, local={"layout": layout}))
    k = [part for part in stage.splits[0].parts if part.component == "k"]
    assert [(part.offset, part.length, part.counts, part.strides) for part in k] == runs


# --- in steps


def test_pauses_come_after_each_batch() -> None:
    """Two thousand tensors of a rank are shown in as many pieces as they have batches, and more."""
    kinds = (LayerKind.FULL,) * (3 * BATCH)
    model = ModelFacts("deep", 1, kinds, key_and_value(1, 2))
    pair = registered(model, 1, 1)
    steps = list(topology_steps(pair.topology, pair.topology.find(REMOTE), 0.0))
    assert len(steps) >= 2 * 2 * 3  # K and V: of its regions, and of its plan's extents


def test_pauses_come_while_the_parts_of_a_stage_are_listed() -> None:
    """Layers that all have another stride fill a part each; layers with one stride share a part."""
    num_layers = 3 * BATCH
    model = ModelFacts("deep", 1, (LayerKind.FULL,) * num_layers, key_and_value(1, 2))
    spec, layout = deploy(model, tp=1, engine_id="decode-0")[FIRST]
    source = deploy(model, tp=1, engine_id=REMOTE)[FIRST]
    uneven = tuple(replace(t, token_stride=t.token_stride * (1 + t.layer)) for t in layout.tensors)
    num_pauses = []
    for tensors in (layout.tensors, uneven):
        topology = TransferTopology(spec, replace(layout, tensors=tensors))
        topology.register_remote_ranks(source[0], {FIRST: source[1]})
        num_pauses.append(len(list(topology_steps(topology, topology.find(REMOTE), 0.0))))
    assert num_pauses[1] >= num_pauses[0] + 2 * (
        2 * num_layers // BATCH - 1
    )  # K and V: put in order, and built


IDS, TOKENS = [3, 1, 2], 11


@pytest.fixture
def world() -> World:
    """A decode rank that has read two engines."""
    world = World()
    prefill, decode = world.host("p"), world.host("d")
    (sink,) = world.engine(decode, "decode")
    for name in ("first", "second"):
        (source,) = world.engine(prefill, name)
        source.fill(IDS, TOKENS, seed=1)
        assert isinstance(sink.ended(sink.pull(source.publish("t", IDS, TOKENS), IDS, TOKENS)), wk.Delivered)
    return world


def names_of(world: World, engine_id: str | None = None) -> list[str]:
    node = world.hosts["d"].node
    wanted = None if engine_id is None else EngineId(engine_id)
    listing = list_topologies(node.registry, node.context, wanted)
    names = [topology.engine_id for topology in listing.steps if topology is not None]
    assert len(names) == listing.num_topologies
    return names


def test_a_node_lists_what_its_ranks_have_read_the_last_used_first(world: World) -> None:
    assert names_of(world) == ["second", "first"]
    assert names_of(world, "first") == ["first"]
    assert names_of(world, "decode") == []


def test_an_engine_that_is_forgotten_between_two_steps_is_left_out(world: World) -> None:
    node = world.hosts["d"].node
    (local,) = node.registry
    (rank,) = local.ranks.values()
    listing = list_topologies(node.registry, node.context)
    next(listing.steps)
    first = rank.topology.find(EngineId("first"))
    rank.topology.use(first.engine_id, first.home, first.manifest(), 1000.0)
    rank.topology.expire(1000.0)
    assert [t.engine_id for t in listing.steps if t is not None] == ["first"]
    with pytest.raises(EngineError) as unknown:
        rank.topology.find(EngineId("second"))
    assert unknown.value.code is Code.ENGINE_UNKNOWN


def test_a_generation_that_is_replaced_between_two_steps_is_left_out(world: World) -> None:
    """Its facts and its successor's would stand in one topology."""
    node = world.hosts["d"].node
    (local,) = node.registry
    (rank,) = local.ranks.values()
    listing = list_topologies(node.registry, node.context, EngineId("second"))
    next(listing.steps)
    engine = rank.topology.find(EngineId("second"))
    rank.topology.register_remote_engine(
        engine.engine_id, engine.stages[0], "another generation", home=engine.home
    )
    assert [t for t in listing.steps if t is not None] == []
