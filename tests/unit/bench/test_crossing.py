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
from kvxferd.bench.measures.crossing import (
    CROSSINGS,
    Crossing,
    crossings_of,
    deployment_of,
    request_tokens,
)
from kvxferd.bench.shapes import EngineOptions
from kvxferd.bench.workload import GIB, MIB
from kvxferd.ids import Rank
from kvxferd.plan import Runs

EQUAL = [Crossing(one.sink, one.sink) for one in CROSSINGS]
TOKEN_BYTES = 4 * 2 * 8 * 256  # four layers, K and V, eight heads of 128 in two bytes


def case_of(crossing: Crossing, num_tokens: int) -> Case:
    deployment = deployment_of("d", crossing, num_tokens)
    blocks = num_tokens // crossing.source.block_tokens
    return Case(deployment=deployment, lists=BlockPattern.FRAGMENTED, blocks=blocks)


def test_several_layouts_are_each_read_from_twice_as_many_ranks() -> None:
    assert crossings_of(("HND",)) == CROSSINGS
    assert list(map(str, crossings_of(("LBNHC", "BHLNC")))) == [
        "LBNHC/16 TP4 to LBNHC/16 TP2",
        "BHLNC/16 TP4 to BHLNC/16 TP2",
    ]


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


# --- the check that stands behind every rate: it must find one wrong byte, wherever it is


# In the sink, in the source, bytes: two short ones, one of two words, and one that counts as long.
RUNS = Runs(
    np.array([0, 4096, 8192, 16384], dtype=np.uint64),
    np.array([65536, 32768, 1024, 131072], dtype=np.uint64),
    np.array([512, 512, 16, 40000], dtype=np.uint64),
)


def moved(nonce: int) -> content.Words:
    """The sink's memory after a perfect move."""
    source = content.words_of(bytearray(1 << 20))
    sink = content.words_of(bytearray(1 << 16))
    content.fill(source)
    content.stamp(source, RUNS, nonce)
    for here, there, length in zip(*(column.astype(np.int64) // 8 for column in RUNS), strict=True):
        sink[here : here + length] = source[there : there + length]
    return sink


def test_content_that_is_not_stamped_is_checked_too() -> None:
    sink = moved(content.UNSTAMPED)
    assert content.count_wrong(sink, RUNS, content.UNSTAMPED) == 0
    assert content.count_wrong(moved(7), RUNS, content.UNSTAMPED) == 2 * len(RUNS.length)


def test_a_perfect_move_is_right() -> None:
    sink = moved(7)
    assert content.count_wrong(sink, RUNS, 7) == 0
    assert content.count_unstamped(sink, RUNS, 7) == 0


@pytest.mark.parametrize("place", [0, 1, 63, 512, 540, 1025, 2048 + 2500, 2048 + 4999])
def test_one_wrong_word_is_found(place: int) -> None:
    sink = moved(7)
    sink[place] ^= np.uint64(1)
    assert content.count_wrong(sink, RUNS, 7) == 1


def test_a_move_of_another_round_is_not_taken_for_this_one() -> None:
    assert content.count_unstamped(moved(6), RUNS, 7) == 2 * len(RUNS.length)


def test_a_run_from_the_wrong_place_is_found() -> None:
    sink = moved(7)
    sink[0:64] = sink[512:576]
    assert content.count_unstamped(sink, RUNS, 7) == 2
    assert content.count_wrong(sink, RUNS, 7) == 64


def test_stamps_can_be_taken_back_and_destinations_wiped() -> None:
    source = content.words_of(bytearray(1 << 20))
    content.fill(source)
    before = source.copy()
    content.stamp(source, RUNS, 3)
    assert int((source != before).sum()) == 2 * len(RUNS.length)
    content.unstamp(source, RUNS)
    assert np.array_equal(source, before)
    sink = moved(7)
    content.wipe(sink, RUNS)
    assert not sink.any()
