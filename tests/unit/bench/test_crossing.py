"""Engines whose layouts differ: what is moved is the same on both sides, and wrong ranks are found out."""

from __future__ import annotations

import numpy as np
import pytest

from kvxferd.bench import content
from kvxferd.bench.cases import (
    BLOCKS_PER_RUN,
    BlockPattern,
    Case,
    block_lists,
    readers_of,
    reads_of,
    stamp_of,
)
from kvxferd.bench.measures.crossing import CROSSINGS, Crossing, deployment_of, request_tokens
from kvxferd.bench.shapes import EngineOptions
from kvxferd.bench.workload import GIB, MIB
from kvxferd.ids import Rank

EQUAL = [Crossing(one.sink, one.sink) for one in CROSSINGS]
TOKEN_BYTES = 4 * 2 * 8 * 256  # four layers, K and V, eight heads of 128 in two bytes


def case_of(crossing: Crossing, num_tokens: int) -> Case:
    deployment = deployment_of("d", crossing, num_tokens)
    blocks = num_tokens // crossing.source.block_tokens
    return Case(deployment=deployment, lists=BlockPattern.FRAGMENTED, blocks=blocks)


@pytest.mark.parametrize("crossing", CROSSINGS, ids=str)
@pytest.mark.parametrize("size", [4 * MIB, 64 * MIB, GIB])
def test_a_request_is_whole_blocks_of_about_its_size(crossing: Crossing, size: int) -> None:
    tokens = request_tokens(crossing, size)
    for side in (crossing.source, crossing.sink):
        assert tokens % (BLOCKS_PER_RUN * side.block_tokens) == 0
    assert abs(tokens * TOKEN_BYTES - size) <= size // 3  # 12 and 16 tokens have a step of 3 MiB


@pytest.mark.parametrize("crossing", [*CROSSINGS, *EQUAL], ids=str)
def test_all_ranks_together_read_every_byte_of_the_request_once(crossing: Crossing) -> None:
    tokens = request_tokens(crossing, 4 * MIB)
    case = case_of(crossing, tokens)
    total = 0
    for sink in case.deployment.engine("sink"):
        for source, runs in reads_of(case, sink, 0).items():
            assert sink in readers_of(case.deployment, source)
            total += int(runs.length.sum())
    assert total == tokens * TOKEN_BYTES


@pytest.mark.parametrize("crossing", CROSSINGS, ids=str)
def test_lists_lie_in_the_pool_of_their_side(crossing: Crossing) -> None:
    case = case_of(crossing, request_tokens(crossing, 4 * MIB))
    for role, options in (("source", crossing.source), ("sink", crossing.sink)):
        (ids,) = block_lists(case, role, 0).values()  # type: ignore[arg-type]
        assert len(ids) == len(set(ids.tolist())) == case.num_tokens // options.block_tokens
        assert ids.max() < case.deployment.pool_of(role)  # type: ignore[arg-type]


def test_bytes_of_another_rank_are_found() -> None:
    """Both ranks hold the same words at the same offset, and different stamps."""
    crossing = Crossing(EngineOptions("HND", 16, tp=2), EngineOptions("HND", 16))
    case = case_of(crossing, request_tokens(crossing, MIB))
    reads = reads_of(case, Rank(0, 0), 0)
    size = max(int((runs.remote + runs.length).max()) for runs in reads.values()) // content.WORD
    sources = {}
    for rank, runs in reads.items():
        sources[rank] = np.zeros(size, dtype=np.uint64)
        content.fill(sources[rank])
        content.stamp(sources[rank], runs, stamp_of(7, rank))
    region = max(int((runs.local + runs.length).max()) for runs in reads.values()) // content.WORD
    for swapped, wrong in ((False, False), (True, True)):
        sink = np.zeros(region, dtype=np.uint64)
        for rank, runs in reads.items():
            source = sources[Rank(0, 1 - rank.tp_rank) if swapped else rank]
            for local, remote, length in zip(*(column // content.WORD for column in runs), strict=True):
                sink[int(local) : int(local + length)] = source[int(remote) : int(remote + length)]
        found = sum(content.count_wrong(sink, runs, stamp_of(7, rank)) for rank, runs in reads.items())
        assert (found > 0) is wrong
