"""The overlap test against sets written out byte by byte."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxferd.layout.overlap import MAX_OVERLAP_WORK, OverlapBudget, StridedSet, find_overlap


def written_out(one: StridedSet) -> list[int]:
    """Return every byte of a set, as often as it is named."""
    offset, num_bytes, axes = one
    starts = [
        offset + sum(i * stride for i, (_, stride) in zip(at, axes, strict=True))
        for at in itertools.product(*(range(length) for length, _ in axes))
    ]
    return [start + byte for start in starts for byte in range(num_bytes)]


def meets(sets: list[StridedSet]) -> bool:
    """Whether any byte is named twice."""
    named = [byte for one in sets for byte in written_out(one)]
    return len(named) != len(set(named))


axes = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 24)), max_size=3)
strided_sets = st.tuples(st.integers(0, 40), st.integers(1, 4), axes)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.lists(strided_sets, min_size=1, max_size=4))
def test_small_sets(sets: list[StridedSet]) -> None:
    """Exact, both ways, for anything that can be written out."""
    found = find_overlap(sets)
    assert (found is not None) == meets(sets)
    if found is not None:
        first, second = found
        assert meets([sets[first]] if first == second else [sets[first], sets[second]])


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 3), axes), min_size=2, max_size=3),
)
def test_sets_with_a_common_outer_stride(blocks: int, inner: list[StridedSet]) -> None:
    """Pages: the same outermost axis on all of them, which is where most layouts end up."""
    sets: list[StridedSet] = [(offset, size, [(blocks, 64), *axes]) for offset, size, axes in inner]
    assert (find_overlap(sets) is not None) == meets(sets)


@pytest.mark.parametrize(
    ("sets", "want"),
    [
        ([(0, 8, [(1000, 16)]), (8, 8, [(1000, 16)])], None),  # K and V side by side
        ([(0, 8, [(1000, 16)]), (7, 8, [(1000, 16)])], (0, 1)),
        ([(0, 8, [(1000, 16), (2, 16000)]), (8000, 8, [(500, 16)])], (0, 1)),
        ([(0, 8, [(1 << 20, 0)])], (0, 0)),  # a stride of nothing
        ([(0, 8, [(1 << 40, 8)])], None),  # however long the axis is
        ([(0, 4, [(1 << 30, 8)]), (4, 4, [(1 << 30, 8)])], None),
        ([(0, 1, [(3, 2), (2, 3)])], None),  # 0 2 4 and 3 5 7: apart, though they do not nest
        ([(0, 1, [(4, 2), (2, 4)])], (0, 0)),  # 4 twice
        # a page of layer 0 ends where one of layer 1 begins, and the tensors' ends chain
        ([(0, 50, [(10, 100)]), (50, 50, [(10, 100)]), (1000, 50, [(10, 100)])], None),
        # outer indexes that never meet: the second begins after the first has ended, modulo equal
        ([(0, 10, [(10, 100)]), (905, 200, []), (1110, 10, [(10, 100)])], (0, 1)),
        ([(0, 10, [(10, 100)]), (910, 200, []), (1110, 10, [(10, 100)])], None),
    ],
)
def test_sets_worked_by_hand(sets: list[StridedSet], want: tuple[int, int] | None) -> None:
    """Including some far too long to write out."""
    assert find_overlap(sets) == want


def test_what_cannot_be_told_apart_counts_as_overlapping() -> None:
    """Two long axes of unlike strides inside one another: refused rather than believed."""
    long = MAX_OVERLAP_WORK
    assert find_overlap([(0, 1, [(long, 7)]), (3, 1, [(long, 14)])]) == (0, 1)


def test_layouts_that_come_together_share_their_places() -> None:
    """One is told apart; the fourth is one too many."""
    unlike = [(0, 1, [(5_000, 6)]), (3, 1, [(5_000, 12)])]
    assert find_overlap(unlike) is None
    places = OverlapBudget()
    assert [find_overlap(unlike, places) for _ in range(2)] == [None, (0, 1)]


def test_comparing_costs_places_too() -> None:
    """Sets that share bytes of one stride and never an index of it: every pair is looked at."""
    crowd = [(2 * turn * 4096 + turn % 2 * 2048, 512, [(4, 4096)]) for turn in range(600)]
    assert find_overlap(crowd, OverlapBudget(100_000)) is None
    assert find_overlap(crowd) is not None
