"""The overlap test against sets written out byte by byte."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxferd.layout.overlap import StridedSet, find_overlap


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


@settings(max_examples=300, deadline=None)
@given(st.lists(strided_sets, min_size=1, max_size=4), st.booleans())
def test_no_byte_that_is_named_twice_is_missed(sets: list[StridedSet], in_pages: bool) -> None:
    """For anything that can be written out; pages are the same outermost axis on all of them."""
    if in_pages:
        sets = [(offset, size, [(3, 64), *axes]) for offset, size, axes in sets]
    assert find_overlap(sets) is not None or not meets(sets)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 60), st.integers(1, 4)), min_size=2, max_size=4))
def test_what_lies_apart_in_a_page_is_told_apart(blocks: int, inside: list[tuple[int, int]]) -> None:
    """Both ways, for parts of pages of 64 bytes, each of which may reach into the next page."""
    sets: list[StridedSet] = [(offset, size, [(blocks + 1, 64)]) for offset, size in inside]
    starts = [offset for offset, _ in inside]
    wraps = max(offset + size for offset, size in inside) - min(starts) > 64
    assert (find_overlap(sets) is not None) == meets(sets) or wraps


@pytest.mark.parametrize(
    ("sets", "want"),
    [
        ([(0, 8, [(1000, 16)]), (8, 8, [(1000, 16)])], None),  # K and V side by side
        ([(0, 8, [(1000, 16)]), (7, 8, [(1000, 16)])], (0, 1)),
        ([(0, 8, [(1000, 16), (2, 16000)]), (8000, 8, [(500, 16)])], (0, 1)),
        ([(0, 8, [(100, 64), (2, 8)]), (16, 8, [(100, 64), (6, 8)])], None),  # blocks of unlike parts
        ([(0, 8, [(1 << 20, 0)])], (0, 0)),  # a stride of nothing
        ([(0, 8, [(1 << 40, 8)])], None),  # however long the axis is
        ([(0, 4, [(1 << 30, 8)]), (4, 4, [(1 << 30, 8)])], None),
        ([(0, 1, [(4, 2), (2, 4)])], (0, 0)),  # 4 twice
        # a page of layer 0 ends where one of layer 1 begins, and the tensors' ends chain
        ([(0, 50, [(10, 100)]), (50, 50, [(10, 100)]), (1000, 50, [(10, 100)])], None),
        # told apart by neither: in steps of unlike sizes among one another
        ([(0, 1, [(3, 2), (2, 3)])], (0, 0)),
        ([(0, 1, [(5_000, 6)]), (3, 1, [(5_000, 12)])], (0, 1)),
    ],
)
def test_sets_worked_by_hand(sets: list[StridedSet], want: tuple[int, int] | None) -> None:
    """Including some far too long to write out."""
    assert find_overlap(sets) == want
