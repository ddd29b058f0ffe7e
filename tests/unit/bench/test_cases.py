"""What is moved: shapes that are a rank of the model, lists that are what they are called."""

import numpy as np
import pytest

from kvxferd.bench.cases import (
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
from kvxferd.cli.bench import SIZES
from kvxferd.ids import Rank
from kvxferd.tooling.engine_pair import EnginePair

POOL = 400


def sized(shape: str, size_bytes: int) -> EnginePair:
    return equal_engines("d", shape, layers_for(shape, size_bytes), POOL)


def case_of(shape: str, pattern: BlockPattern, blocks: int = 32, slots: int = 3) -> Case:
    return Case(sized(shape, 64 * MIB), pattern, blocks, slots)


@pytest.mark.parametrize(
    ("shape", "size"),
    # The states of a hybrid alone are 50 MiB.
    [
        (shape, size)
        for shape in SHAPES
        for size in SIZES.values()
        if shape != "mamba2-hybrid" or size >= 64 * MIB
    ],
)
def test_a_pull_has_about_the_size_that_was_asked_for(shape: str, size: int) -> None:
    pair = sized(shape, size)
    of = footprint(pair)
    moved = blocks_for(pair, size) * of.block_bytes + of.state_bytes
    assert abs(moved - size) <= of.block_bytes / 2


@pytest.mark.parametrize("shape", [*SHAPES, IDS_SHAPE])
@pytest.mark.parametrize("pattern", BlockPattern)
def test_what_runs_name_is_what_the_pull_holds(shape: str, pattern: BlockPattern) -> None:
    case = case_of(shape, pattern, slots=1)
    of = footprint(case.pair)
    assert int(runs_of(case, 0).length.sum()) == 32 * of.block_bytes + of.state_bytes


@pytest.mark.parametrize("shape", ["qwen3-8b", "mamba2-hybrid"])
@pytest.mark.parametrize("pattern", BlockPattern)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_no_id_is_used_twice(shape: str, pattern: BlockPattern, role: str) -> None:
    case = case_of(shape, pattern)
    ids = [block_lists(case, role, slot) for slot in range(case.slots)]
    used = np.concatenate([group for slot in ids for group in slot.values()])
    assert len(np.unique(used)) == len(used)
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
