"""Numbers and units as text."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.explain.formatting import format_numbers, format_unit_ranges, format_units
from kvxferd.layout import UnitRange


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([7], "7"),
        ([7, 0, 2, 1, 3], "0-3, 7"),
        (range(0, 40, 4), "0, 4, ..., 36"),
        ([0, 1, 3, 4, 7, 9, 12], "7 of 0-12"),
    ],
)
def test_numbers_are_shown_as_ranges(numbers: list[int], text: str) -> None:
    assert format_numbers(numbers) == text


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=8))
def test_ranges_are_shown_as_their_units_are(steps: list[tuple[int, int]]) -> None:
    """Ranges apart or adjacent, empty ones too, in any order."""
    ends = list(itertools.accumulate(itertools.chain.from_iterable(steps)))
    ranges = [UnitRange(a, b) for a, b in zip(ends[::2], ends[1::2], strict=True)]
    units = [unit for held in ranges for unit in range(held.start, held.stop)]
    assert format_unit_ranges(reversed(ranges)) == format_numbers(units)


def test_a_rank_that_holds_countless_units_costs_its_reader_nothing() -> None:
    """A layout may have a billion units of one byte. Counted out they are 35 GB of an operator's memory."""
    countless = UnitRange(0, 1 << 62)
    assert format_unit_ranges((countless,)) == f"0-{(1 << 62) - 1}"
    assert format_units({"ssm": (countless,)}) == f"ssm 0-{(1 << 62) - 1}"
