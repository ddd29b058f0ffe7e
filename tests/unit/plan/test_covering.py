"""Covering reads of small requests, worked by hand: how many stretches, of how many forms, and how long."""

from __future__ import annotations

import numpy as np
import pytest

from kvxferd.ids import Rank
from kvxferd.mover.chunks.covering import CoverSlicer
from kvxferd.plan import Plan, stretches
from kvxferd.plan.covering import CoveredRank, CoverExpander
from kvxferd.plan.stretches import MAX_FORMS, MAX_GAP_BYTES, MAX_RUNS, MAX_STRETCH_BYTES, cover_block
from tests.support.attention_engines import KV, blocks, engine, layout_of, plan_between

SOURCE = Rank(0, 0)


def covered(plan: Plan, mine: list[int], theirs: list[int]) -> CoveredRank:
    """Expand with local memory at 1,000,000 and the source's at 2,000,000."""
    request = CoverExpander(plan).prepare(blocks(mine), blocks(theirs))
    assert request is not None
    (part,) = request.parts({KV: 1_000_000}, {SOURCE: {KV: 2_000_000}})
    return part[SOURCE]


def listed(part: CoveredRank) -> list[tuple[int, int]]:
    """Return (remote offset, length) of each stretch."""
    return [(at - 2_000_000, s.form.size_bytes) for s in part.stretches for at in s.remote.tolist()]


def test_a_block_whose_order_differs_is_one_stretch_a_tensor() -> None:
    """4 heads x 4 tokens of 4 bytes: 64 bytes a block and tensor, 16 runs each, all layers of one form."""
    part = covered(plan_between(engine(layout="NHD"), engine(layout="HND")), [3, 1], [5, 9])
    (stretches,) = part.stretches
    assert stretches.form.num_copies == 16
    assert stretches.form.is_packed
    tensor = 16 * 64
    starts = [tensor * number + 64 * block for number in range(4) for block in (5, 9)]
    assert sorted(at for at, _ in listed(part)) == starts
    assert {size for _, size in listed(part)} == {64}
    assert stretches.num_bytes == stretches.covered_bytes == 8 * 64


def test_a_larger_remote_block_is_read_once() -> None:
    """Blocks of 8 tokens there, heads first: each half of a head goes to a local block of its own."""
    plan = plan_between(engine(block_tokens=4), engine(block_tokens=8))
    part = covered(plan, [0, 5], [3])
    assert {size for _, size in listed(part)} == {128}
    assert len(listed(part)) == 4
    (stretches,) = part.stretches
    assert stretches.form.num_blocks == 2
    assert stretches.num_bytes == stretches.covered_bytes


@pytest.mark.parametrize(
    ("plan", "mine"),
    [
        (plan_between(engine(layout="NHD"), engine()), [0, 1, 2, 3]),
        (plan_between(engine(block_tokens=8), engine(block_tokens=4)), [0, 1]),
    ],
)
@pytest.mark.parametrize(("theirs", "want"), [([5, 9, 7, 2], 16), ([9, 5, 8, 6], 8), ([4, 3, 6, 5], 4)])
def test_descriptors_are_counted_as_they_are_posted(
    plan: Plan, mine: list[int], theirs: list[int], want: int
) -> None:
    """Four blocks of each of the source's 4 tensors; blocks that follow one another are read at once."""
    request = CoverExpander(plan).prepare(blocks(mine), blocks(theirs))
    assert request is not None
    assert sum(one.num_descriptors for one in request.forms()) == want
    assert CoverSlicer(covered(plan, mine, theirs).stretches, []).num_descriptors == want


def test_a_stretch_is_no_longer_than_a_blocks_stride() -> None:
    """Items of 4 bytes, 4 bytes apart from the next block's: the gap between two items is of other blocks."""
    runs = (np.array([0, 4, 8]), np.array([0, 40, 80]), np.array([4, 4, 4]))
    (one,) = cover_block([runs], remote_block_stride=4) or ()
    assert one.remote.tolist() == [0, 40, 80]
    (one,) = cover_block([runs], remote_block_stride=100) or ()
    assert one.remote.tolist() == [0]
    assert one.form.size_bytes == 84


def test_a_long_stretch_is_cut_between_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches, "MAX_STRETCH_BYTES", 13)
    runs = (np.arange(5) * 4, np.arange(5) * 8, np.full(5, 4))
    one, rest = sorted(cover_block([runs], 1000) or (), key=lambda one: one.remote[0])
    assert (one.remote.tolist(), one.form.size_bytes) == ([0, 16], 12)
    assert (rest.remote.tolist(), rest.form.size_bytes) == ([32], 4)


def test_a_gap_that_costs_more_than_a_descriptor_is_not_read() -> None:
    far = MAX_GAP_BYTES + 5
    (one,) = cover_block([(np.array([0, 4]), np.array([0, far]), np.array([4, 4]))], 2 * far) or ()
    assert one.remote.tolist() == [0, far]


def test_a_stretch_outside_its_region_is_refused() -> None:
    part = covered(plan_between(engine(layout="NHD"), engine()), [3], [5])
    moved = [one._replace(local=one.local - 100_000) for one in part.stretches]
    with pytest.raises(ValueError, match="before its region"):
        CoverSlicer(moved, [])


def test_block_sizes_without_a_small_common_multiple_are_not_covered() -> None:
    """Each remote block would need tables of its own."""
    mine, theirs = (engine(block_tokens=size, heads=1, layers=1) for size in (101, 103))
    request = CoverExpander(plan_between(mine, theirs)).prepare(blocks(range(16)), blocks(range(16)))
    assert request is not None
    assert len({one.form for one in request.forms()}) > 10
    mine, theirs = (
        {r: (s, layout_of(s, block_tokens=size, num_blocks=200)) for r, (s, _) in held.items()}
        for size, held in ((101, mine), (103, theirs))
    )
    assert CoverExpander(plan_between(mine, theirs)).prepare(blocks(range(200)), blocks(range(190))) is None


def test_blocks_that_do_not_repeat_or_of_too_many_runs_are_not_covered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither many short ones, nor one that is cut into many, nor many lengths."""
    rng = np.random.default_rng(1)
    length = np.full(10 * MAX_FORMS, 4)
    remote = np.cumsum(rng.integers(1, 1000, len(length)) * 4)
    with monkeypatch.context() as patch:
        patch.setattr(stretches, "MAX_GAP_BYTES", 1999)
        assert cover_block([(np.arange(len(length)) * 4, remote, length)], 5000) is None
    count = MAX_RUNS + 1
    length = np.full(count, 4)
    assert cover_block([(np.arange(count) * 4, np.arange(count) * 8, length)], 1 << 30) is None
    zero = np.zeros(1, dtype=np.int64)
    assert cover_block([(zero, zero, np.array([MAX_STRETCH_BYTES * count]))], 1 << 50) is None
    length = np.arange(1, 20_001)
    start = np.cumsum(length + 1) - length
    assert cover_block([(start, start, length)], 1 << 30) is None


def test_a_part_is_no_more_runs_than_are_expanded_at_a_time() -> None:
    """All of it may come to be read directly: where no chunk is granted, for one."""
    plan = plan_between(engine(layout="NHD"), engine())
    request = CoverExpander(plan).prepare(blocks(range(12)), blocks(range(12)))
    assert request is not None
    bases = {KV: 1_000_000}, {SOURCE: {KV: 2_000_000}}
    for max_runs in (1, 64, 130, 1 << 20):
        parts = [part[SOURCE] for part in request.parts(*bases, max_runs=max_runs)]
        num_runs = [sum(len(one.remote) * one.form.num_copies for one in part.stretches) for part in parts]
        assert max(num_runs) <= max(64, max_runs), "a block is 64 runs"
        assert sum(num_runs) == 12 * 64


def test_of_what_does_not_repeat_a_part_is_no_more_runs_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches, "MAX_FORMS", 0)
    apart = blocks(range(0, 16, 2))  # no run goes on in the next block
    request = CoverExpander(plan_between(engine(layout="NHD"), engine())).prepare(apart, apart)
    assert request is not None
    bases = {KV: 1_000_000}, {SOURCE: {KV: 2_000_000}}
    for max_runs, want in ((64, [64] * 8), (130, [128] * 4), (1 << 20, [512])):
        parts = [part[SOURCE] for part in request.parts(*bases, max_runs=max_runs)]
        assert not any(part.stretches for part in parts)
        assert [sum(len(runs.remote) for runs in part.runs) for part in parts] == want
