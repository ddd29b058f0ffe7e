"""What is moved: shapes that are a rank of the model, lists that are what they are called."""

from __future__ import annotations

import numpy as np
import pytest

from kvxferd.bench.cases import (
    BLOCKS_PER_RUN,
    IDS_SHAPE,
    MIB,
    SHAPES,
    BlockPattern,
    Case,
    block_lists,
    blocks_for,
    equal_engines,
    footprint,
    layers_for,
    layout_of,
    runs_of,
)
from kvxferd.bench.measures.layouts import ALL_LAYOUTS, Layouts, pair_of, request_tokens
from kvxferd.cli.bench import SIZES
from kvxferd.ids import Rank
from kvxferd.tooling.engine_pair import ROLES, EnginePair

POOL = 400
TOKEN_BYTES = 4 * 2 * 8 * 256  # four layers, K and V, eight heads of 128 in two bytes


def sized(shape: str, size_bytes: int) -> EnginePair:
    return equal_engines("d", shape, layers_for(shape, size_bytes), POOL)


def case_of(shape: str, pattern: BlockPattern, blocks: int = 32, slots: int = 3) -> Case:
    return Case(sized(shape, 64 * MIB), pattern, blocks, slots)


@pytest.mark.parametrize("size", SIZES.values())
@pytest.mark.parametrize("shape", SHAPES)
def test_a_pull_has_about_the_size_that_was_asked_for(shape: str, size: int) -> None:
    if shape == "mamba2-hybrid" and size < 64 * MIB:
        return  # its states alone are 50 MiB
    pair = sized(shape, size)
    of = footprint(pair)
    moved = blocks_for(pair, size) * of.block_bytes + of.state_bytes
    assert abs(moved - size) <= of.block_bytes / 2


@pytest.mark.parametrize("shape", [*SHAPES, IDS_SHAPE])
@pytest.mark.parametrize("pattern", BlockPattern)
def test_runs_name_what_the_pull_holds_and_no_id_is_used_twice(shape: str, pattern: BlockPattern) -> None:
    case = case_of(shape, pattern)
    of = footprint(case.pair)
    assert int(runs_of(case, 0).length.sum()) == 32 * of.block_bytes + of.state_bytes
    for role in ROLES:
        slots = [block_lists(case, role, slot) for slot in range(case.slots)]
        used = np.concatenate([ids for slot in slots for ids in slot.values()])
        assert len(np.unique(used)) == len(used), role
        assert used.min() >= 0
        assert used.max() < POOL


@pytest.mark.parametrize(
    ("pattern", "most"),
    [(BlockPattern.CONTIGUOUS, 1), (BlockPattern.FRAGMENTED, 8), (BlockPattern.SCATTERED, 32)],
)
def test_lists_are_as_broken_as_they_are_called(pattern: BlockPattern, most: int) -> None:
    ids = block_lists(case_of("qwen3-8b", pattern), "prefill", 0)["full"]
    stretches = 1 + int((np.diff(ids) != 1).sum())
    assert most * 0.7 <= stretches <= most


def test_a_list_longer_than_the_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot list 1200 blocks: the pool has 400"):
        block_lists(case_of("qwen3-8b", BlockPattern.SCATTERED, blocks=400), "decode", 0)


@pytest.mark.parametrize("shape", ["llama-3-70b", "mamba2-hybrid"])
def test_no_two_slots_and_no_two_rounds_have_the_same_content(shape: str) -> None:
    case = case_of(shape, BlockPattern.SCATTERED)
    requests = [case.request("prefill", slot, number) for number in (1, 2) for slot in range(case.slots)]
    assert len({request.request for request in requests}) == 2 * case.slots
    assert {request.num_tokens for request in requests} == {32 * footprint(case.pair).block_tokens}
    assert case.num_tokens % case.ends_of == 0
    assert layout_of(case.pair) == case.pair.engine("decode")[Rank(0, 0)][1]


# --- engines whose layouts differ


@pytest.mark.parametrize("layouts", ALL_LAYOUTS, ids=str)
@pytest.mark.parametrize("size", [4 * MIB, 64 * MIB])
def test_a_request_is_whole_blocks_of_about_its_size_in_the_pool_of_each_side(
    layouts: Layouts, size: int
) -> None:
    tokens = request_tokens(layouts, size)
    for side in layouts[:2]:
        assert tokens % (BLOCKS_PER_RUN * side.block_tokens) == 0
    assert abs(tokens * TOKEN_BYTES - size) <= size // 3  # 12 and 16 tokens have a step of 3 MiB
    pair = pair_of("d", layouts, tokens)
    case = Case(pair, BlockPattern.FRAGMENTED, tokens // layouts.prefill.block_tokens)
    assert case.num_tokens == tokens
    for role in ROLES:
        (ids,) = block_lists(case, role, 0).values()
        assert len(ids) == len(set(ids.tolist())) == tokens // pair.shape(role).block_tokens
        assert ids.max() < pair.num_blocks(role)
        assert case.ends_of % footprint(pair, role).block_tokens == 0
