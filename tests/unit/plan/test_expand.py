"""Runs of small requests, worked by hand: what merges, what is cut, and in which order."""

from __future__ import annotations

import msgspec
import pytest

from kvxferd.errors import PlanError
from kvxferd.ids import Rank, RegionId
from kvxferd.layout import EngineSpec, RankLayout, TokenShard
from kvxferd.plan import Expander
from tests.support.attention_engines import KV, blocks, engine, expand, listed, plan_between

# One layer, one head of 4 bytes per token, blocks of 4 tokens: 16 bytes a block, 16 blocks, so
# K is [0, 256) and V is [256, 512).
ONE = {"heads": 1, "layers": 1}
SOURCE = Rank(0, 0)


@pytest.mark.parametrize(
    ("mine", "theirs", "want"),
    [
        ([4, 5, 6], [8, 9, 10], [(64, 128, 48), (320, 384, 48)]),  # one run of K, and one of V
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


def test_a_rank_that_holds_all_tokens_has_them_in_order_whatever_its_interleave_is() -> None:
    """The interleave of a single shard means nothing: both lists begin at token 4, inside one of 16."""

    def interleaved(held: tuple[EngineSpec, RankLayout]) -> tuple[EngineSpec, RankLayout]:
        (group,) = held[1].groups
        group = msgspec.structs.replace(group, token_shard=TokenShard(interleave=16))
        return held[0], msgspec.structs.replace(held[1], groups=(group,))

    sink = engine(**ONE)
    source = {rank: interleaved(held) for rank, held in sink.items()}
    runs = expand(plan_between(sink, source), [4, 5, 6, 7], [8, 9, 10, 11], (4, 4))[SOURCE]
    assert listed(runs) == [(64, 128, 64), (320, 384, 64)]


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
