"""What is moved: shapes that are a rank of the model, lists that are what they are called."""

import numpy as np
import pytest

from kvxferd.bench.cases import BlockPattern, Case, block_lists, blocks_for, runs_of
from kvxferd.bench.shapes import FIRST_RANK, IDS_SHAPE, SHAPES, BenchDeployment, footprint, layers_for
from kvxferd.bench.workload import ALL_SIZES, MIB
from kvxferd.layout.presets import deploy

POOL = 400


def sized(shape: str, size_bytes: int, pool_blocks: int = POOL) -> BenchDeployment:
    return BenchDeployment(
        name="d", shape=shape, layers=layers_for(shape, size_bytes), pool_blocks=pool_blocks
    )


def case_of(shape: str, lists: BlockPattern, blocks: int = 32, slots: int = 3) -> Case:
    return Case(deployment=sized(shape, 64 * MIB), lists=lists, blocks=blocks, slots=slots)


def test_eight_ranks_of_llama_are_the_engine_of_tp8() -> None:
    eight = BenchDeployment(name="d", shape="llama-3-70b", layers=80, pool_blocks=POOL, ranks=8)
    theirs = deploy("llama-3-70b", tp=8, num_blocks=POOL)
    assert {rank: layout for rank, (_, layout) in eight.engine("sink").items()} == {
        rank: layout for rank, (_, layout) in theirs.items()
    }


@pytest.mark.parametrize(
    ("shape", "size"),
    # The states of a hybrid alone are 50 MiB.
    [(shape, size) for shape in SHAPES for size in ALL_SIZES if shape != "mamba2-hybrid" or size >= 64 * MIB],
)
def test_a_pull_has_about_the_size_that_was_asked_for(shape: str, size: int) -> None:
    deployment = sized(shape, size)
    of = footprint(deployment.layout())
    moved = blocks_for(deployment, size) * of.block_bytes + of.state_bytes
    assert abs(moved - size) <= of.block_bytes / 2


@pytest.mark.parametrize("shape", [*SHAPES, IDS_SHAPE])
@pytest.mark.parametrize("lists", BlockPattern)
def test_what_runs_name_is_what_the_pull_holds(shape: str, lists: BlockPattern) -> None:
    case = (
        case_of(shape, lists)
        if shape != IDS_SHAPE
        else Case(deployment=sized(IDS_SHAPE, MIB), lists=lists, blocks=32)
    )
    of = footprint(case.deployment.layout())
    runs = runs_of(case, FIRST_RANK, 0)
    assert int(runs.length.sum()) == 32 * of.block_bytes + of.state_bytes
    assert not (runs.length % 8).any()
    assert not (runs.local % 8).any()
    assert not (runs.remote % 8).any()


@pytest.mark.parametrize("shape", ["qwen3-8b", "mamba2-hybrid"])
@pytest.mark.parametrize("lists", BlockPattern)
@pytest.mark.parametrize("role", ["source", "sink"])
def test_no_id_is_used_twice(shape: str, lists: BlockPattern, role: str) -> None:
    case = case_of(shape, lists)
    ids = [block_lists(case, role, slot) for slot in range(case.slots)]
    used = np.concatenate([group for slot in ids for group in slot.values()])
    assert len(np.unique(used)) == len(used)
    assert used.min() >= 0
    assert used.max() < POOL


@pytest.mark.parametrize(
    ("lists", "most"),
    [(BlockPattern.CONTIGUOUS, 1), (BlockPattern.FRAGMENTED, 8), (BlockPattern.SCATTERED, 32)],
)
def test_lists_are_as_broken_as_they_are_called(lists: BlockPattern, most: int) -> None:
    ids = block_lists(case_of("qwen3-8b", lists), "source", 0)["full"]
    stretches = 1 + int((np.diff(ids) != 1).sum())
    assert most * 0.7 <= stretches <= most


def test_both_sides_of_a_scattered_list_differ() -> None:
    case = case_of("qwen3-8b", BlockPattern.SCATTERED)
    sides = [block_lists(case, role, 0)["full"] for role in ("source", "sink")]
    assert not np.array_equal(*sides)
    # Eighty layers or thirty-six: what is scattered on both sides merges hardly anywhere.
    assert len(runs_of(case, FIRST_RANK, 0).length) > 0.9 * 32 * 72


def test_a_list_longer_than_the_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot list 1200 blocks: the pool has 400"):
        block_lists(case_of("qwen3-8b", BlockPattern.SCATTERED, blocks=400), "sink", 0)
