"""Runs of small requests, worked by hand: what merges, what is cut, and in which order."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvxferd.errors import PlanError
from kvxferd.ids import Rank, RegionId
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.layout.validate import validate_layout
from kvxferd.plan import Expander, Plan, Runs
from tests.support.attention_engines import KV, blocks, engine, expand, listed, plan_between

# One layer, one head of 4 bytes per token, blocks of 4 tokens: 16 bytes a block, 16 blocks, so
# K is [0, 256) and V is [256, 512).
ONE = {"heads": 1, "layers": 1}
SOURCE = Rank(0, 0)


def test_neighbouring_blocks_become_one_run() -> None:
    """Ids consecutive on both sides; K and V are apart."""
    runs = expand(plan_between(engine(**ONE), engine(**ONE)), [4, 5, 6], [8, 9, 10])
    assert listed(runs[SOURCE]) == [(64, 128, 48), (320, 384, 48)]


def test_every_block_of_a_tensor_touches_the_next_tensor() -> None:
    """All 16 blocks of K, then all of V: one run for the whole region."""
    plan = plan_between(engine(**ONE), engine(**ONE))
    assert listed(expand(plan, range(16), range(16))[SOURCE]) == [(0, 0, 512)]


@pytest.mark.parametrize(
    ("mine", "theirs", "want"),
    [
        ([4, 6], [8, 9], [(64, 128, 16), (96, 144, 16)]),  # apart here
        ([4, 5], [8, 10], [(64, 128, 16), (80, 160, 16)]),  # apart there
        ([5, 4], [9, 8], [(64, 128, 32)]),  # descending on both sides: still one stretch
        ([5, 4], [8, 9], [(64, 144, 16), (80, 128, 16)]),  # crossed
    ],
)
def test_blocks_merge_where_both_sides_go_on(
    mine: list[int], theirs: list[int], want: list[tuple[int, int, int]]
) -> None:
    """K's half of the runs; local addresses ascend whatever the order of ids."""
    plan = plan_between(engine(**ONE), engine(**ONE))
    assert listed(expand(plan, mine, theirs)[SOURCE])[: len(want)] == want


def test_a_larger_local_block_takes_several_remote_ones() -> None:
    """8 tokens here, 4 there: the halves of a block come from two blocks."""
    plan = plan_between(engine(**ONE, block_tokens=8), engine(**ONE))
    assert listed(expand(plan, [1], [3, 9])[SOURCE])[:2] == [(32, 48, 16), (48, 144, 16)]
    assert listed(expand(plan, [1], [3, 4])[SOURCE])[:1] == [(32, 48, 32)]


def test_block_sizes_that_do_not_divide() -> None:
    """12 and 16 tokens: cut wherever either side's block ends."""
    plan = plan_between(engine(**ONE, block_tokens=12), engine(**ONE, block_tokens=16))
    runs = listed(expand(plan, [0, 2, 4, 6], [1, 3, 5])[SOURCE])
    tokens = [(local // 4, remote // 4, length // 4) for local, remote, length in runs if local < 768]
    assert tokens == [(0, 16, 12), (24, 28, 4), (28, 48, 8), (48, 56, 8), (56, 80, 4), (72, 84, 12)]


def test_a_prefix_hit_moves_the_rest() -> None:
    """The first 8 tokens are here already; the source lists all 12."""
    plan = plan_between(engine(**ONE), engine(**ONE))
    assert listed(expand(plan, [5], [7, 8, 9], first=(8, 0))[SOURCE])[:1] == [(80, 144, 16)]


def test_a_prefix_hit_inside_the_sources_block() -> None:
    """Blocks of 4 here from token 4 on, of 8 there from token 0 on: half of theirs is skipped."""
    plan = plan_between(engine(**ONE), engine(**ONE, block_tokens=8))
    assert listed(expand(plan, [5], [7], first=(4, 0))[SOURCE])[:1] == [(80, 7 * 32 + 16, 16)]


def test_a_window_takes_what_the_source_has() -> None:
    """The source begins at token 4: our first block is left as it is."""
    plan = plan_between(engine(**ONE), engine(**ONE))
    assert listed(expand(plan, [1, 3], [7], first=(0, 4))[SOURCE])[:1] == [(48, 112, 16)]


def test_a_full_hit_moves_nothing() -> None:
    """No local blocks: no rank is read."""
    plan = plan_between(engine(**ONE), engine(**ONE))
    assert expand(plan, [], [0, 1], first=(8, 0)) == {}


def test_a_narrower_peer_gives_its_half() -> None:
    """Two heads there, one here: HND heads are contiguous in a block."""
    plan = plan_between(engine(tp=2, heads=2, layers=1), engine(heads=2, layers=1), (0, 1))
    assert listed(expand(plan, [0, 1], [0, 1])[SOURCE])[:2] == [(0, 16, 16), (16, 48, 16)]


def test_other_axis_order_moves_head_by_head() -> None:
    """NHD here, HND there, two heads of 4 tokens: 4-byte runs."""
    sink = engine(heads=2, layers=1, layout="NHD")
    runs = listed(expand(plan_between(sink, engine(heads=2, layers=1)), [0], [0])[SOURCE])
    assert runs[:8] == [(8 * t + 4 * h, 16 * h + 4 * t, 4) for t in range(4) for h in range(2)]


@pytest.mark.parametrize("layout", ["HND", "NHD", "HND-blocks-first", "NHD-cross-layer", "HND-packed"])
def test_equal_layouts_move_whole_blocks(layout: str) -> None:
    """Whatever the layout is: one run for each array that blocks lie in, when ids go on."""
    sink = engine(layout=layout)
    runs = expand(plan_between(sink, engine(layout=layout)), [1, 2, 3], [5, 6, 7])[SOURCE]
    arrays = {"HND": 4, "NHD": 4, "HND-blocks-first": 2, "NHD-cross-layer": 1, "HND-packed": 2}
    assert len(runs.local) == arrays[layout]
    assert int(runs.length.sum()) == 3 * 4 * 4 * 4 * 2 * 2  # blocks, tokens, heads, bytes, K and V, layers


def test_runs_do_not_reach_across_regions() -> None:
    """V in a region of its own whose memory follows K's at once, on both sides."""

    def split(held: tuple[EngineSpec, RankLayout]) -> tuple[EngineSpec, RankLayout]:
        k, v = held[1].tensors
        size = msgspec.structs.replace(held[1].regions[0], size_bytes=256)
        other = msgspec.structs.replace(size, region=RegionId("v"))
        moved = msgspec.structs.replace(v, region=RegionId("v"), offset=0)
        return held[0], msgspec.structs.replace(held[1], tensors=(k, moved), regions=(size, other))

    ranks = {rank: split(held) for rank, held in engine(**ONE).items()}
    at = {KV: 1 << 20, RegionId("v"): (1 << 20) + 256}
    every = blocks(range(16))
    runs = Expander(plan_between(ranks, ranks)).expand(every, every, 64, at, {SOURCE: at})[SOURCE]
    assert list(zip(runs.local.tolist(), runs.length.tolist(), strict=True)) == [
        (1 << 20, 256),
        ((1 << 20) + 256, 256),
    ]


def strided(plan: Plan, mine: list[int], theirs: list[int]) -> int:
    """Return how many bytes a request moves, after checking that runs ascend and none overlap."""
    runs = expand(plan, mine, theirs)[SOURCE]
    ends = runs.local[:-1] + runs.length[:-1]
    assert (runs.local[1:] >= ends).all()
    return int(runs.length.sum())


def test_pages_that_lie_differently_for_each_shape() -> None:
    """Equal block strides, other token strides: where a half block begins differs between K and V."""
    own, layout = engine(heads=1, layers=1, block_tokens=8)[Rank(0, 0)]
    k, v = layout.tensors
    wide = msgspec.structs.replace(v, token_stride=8, block_stride=64, offset=16 * 64)
    page = msgspec.structs.replace(k, block_stride=64)
    region = msgspec.structs.replace(layout.regions[0], size_bytes=2 * 16 * 64)
    sink = {Rank(0, 0): (own, msgspec.structs.replace(layout, tensors=(page, wide), regions=(region,)))}
    own, layout = engine(heads=1, layers=1)[Rank(0, 0)]
    k, v = layout.tensors
    source = {
        Rank(0, 0): (
            own,
            msgspec.structs.replace(
                layout,
                tensors=(
                    msgspec.structs.replace(k, block_stride=32),
                    msgspec.structs.replace(v, block_stride=32, token_stride=8, offset=512),
                ),
                regions=(msgspec.structs.replace(layout.regions[0], size_bytes=1024),),
            ),
        )
    }
    runs = listed(expand(plan_between(sink, source), [1], [3, 9])[SOURCE])
    assert runs[:2] == [(64, 96, 16), (80, 288, 16)]
    assert runs[2:] == [
        *[(1024 + 64 + 8 * t, 512 + 96 + 8 * t, 4) for t in range(4)],
        *[(1024 + 64 + 32 + 8 * t, 512 + 288 + 8 * t, 4) for t in range(4)],
    ]


def test_the_only_block_needs_no_stride() -> None:
    """One block, stride 0: legal, as there is no next one."""
    own, layout = engine(**ONE)[SOURCE]
    group = msgspec.structs.replace(layout.groups[0], num_blocks=1)
    tensors = tuple(msgspec.structs.replace(t, block_stride=0) for t in layout.tensors)
    ranks = {SOURCE: (own, msgspec.structs.replace(layout, groups=(group,), tensors=tensors))}
    validate_layout(*ranks[SOURCE])
    assert listed(expand(plan_between(ranks, ranks), [0], [0])[SOURCE]) == [(0, 0, 16), (256, 256, 16)]


def test_many_shapes_are_not_kept_for_ever() -> None:
    """Sizes with a large common multiple: the rows of old shapes are given up, the runs stay right."""
    plan = plan_between(engine(**ONE, block_tokens=67), engine(**ONE, block_tokens=71))
    assert strided(plan, list(range(16)), list(range(15))) == 15 * 71 * 4 * 2


@pytest.mark.parametrize(
    "changes",
    [
        {"chunk_bytes": 1, "num_chunks": 1 << 24, "chunk_stride": 2},  # bytes apart
        {"chunk_bytes": 1, "num_chunks": 1 << 40, "chunk_stride": 2},  # more than there is memory for
        {"chunk_bytes": 2, "num_chunks": 1 << 18, "chunk_stride": 4},  # few in a head, many in a block
    ],
)
def test_a_block_scattered_over_millions_of_stretches_is_refused(changes: dict[str, int]) -> None:
    """No memory for a layout that is a mistake."""
    sink = engine(layers=1, heads=16)
    own, layout = sink[SOURCE]
    content = changes["num_chunks"] * changes["chunk_bytes"]
    wide = [msgspec.structs.replace(t, chunk_bytes=content) for t in layout.tensors]
    cut = [msgspec.structs.replace(t, **changes) for t in layout.tensors]
    plan = plan_between(
        {SOURCE: (own, msgspec.structs.replace(layout, tensors=tuple(wide)))},
        {SOURCE: (own, msgspec.structs.replace(layout, tensors=tuple(cut)))},
    )
    with pytest.raises(PlanError, match="one block is scattered over"):
        expand(plan, [0], [0])


def test_expansion_is_the_same_every_time() -> None:
    """The second request uses the kept rows of the first."""
    plan = plan_between(engine(), engine(layout="NHD"))
    expander = Expander(plan)
    at = ({KV: 0}, {SOURCE: {KV: 0}})
    first, second = (expander.expand(blocks([3, 1]), blocks([0, 9]), 8, *at)[SOURCE] for _ in range(2))
    for mine, theirs in zip(first, second, strict=True):
        assert np.array_equal(mine, theirs)
        assert mine.dtype == np.uint64


@pytest.mark.parametrize(
    ("sink", "source"), [("NHD", "HND"), ("HND", "HND"), ("NHD-cross-layer", "HND-packed")]
)
@pytest.mark.parametrize("max_runs", [1, 7, 100, 10_000])
def test_parts_move_the_same_bytes(sink: str, source: str, max_runs: int) -> None:
    """A long request comes in parts; together they name every byte once, in bounds."""
    plan = plan_between(engine(layout=sink, block_tokens=8), engine(layout=source, tp=2))
    at = ({KV: 0}, {rank: {KV: 0} for rank in plan.sources})
    lists = (blocks([3, 1, 2]), blocks([4, 5, 6, 7, 9, 0]))
    parts = list(Expander(plan).parts(*lists, 24, *at, max_runs=max_runs))
    whole = Expander(plan).expand(*lists, 24, *at)
    assert len(parts) == 1 or all(len(r.local) <= max(max_runs, 32) for part in parts for r in part.values())
    for rank, runs in whole.items():
        named = [pair for part in parts if rank in part for pair in bytes_named(part[rank])]
        assert sorted(bytes_named(runs)) == sorted(named)


def bytes_named(runs: Runs) -> list[tuple[int, int]]:
    """Return every (local, remote) byte."""
    return [
        (local + i, remote + i)
        for local, remote, length in zip(*(column.tolist() for column in runs), strict=True)
        for i in range(length)
    ]


def test_an_empty_list_begins_nowhere() -> None:
    """Its first_token may be anything: nothing is computed with it."""
    plan = plan_between(engine(), engine(layout="NHD"))
    for first in (3, 2**63):
        assert expand(plan, [], [0, 1], (first, 0)) == {}
        assert expand(plan, [0, 1], [], (0, first)) == {}
