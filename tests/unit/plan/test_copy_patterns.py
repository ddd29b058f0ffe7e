"""Forms as strided copies: how few there are, and that they write exactly what the form's copies write."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxferd.plan.copy_patterns import CopyPattern, form_patterns, progressions
from kvxferd.plan.stretches import Copies, StretchForm

MAX_PITCH = (1 << 31) - 1


def int64s(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def form_of(copies: list[tuple[int, int, int, int]], num_blocks: int = 1) -> StretchForm:
    """Return the form with these (length, image, local, block)."""
    made = []
    for length in sorted({one[0] for one in copies}):
        alike = sorted(one[1:] for one in copies if one[0] == length)
        image, local, block = (int64s(list(column)) for column in zip(*alike, strict=True))
        made.append(Copies(length, image, local, None if num_blocks == 1 else block))
    return StretchForm(max(one[1] + one[0] for one in copies), num_blocks, tuple(made))


def bytes_of_form(form: StretchForm) -> list[tuple[int, int, int]]:
    """Return (block, local, image) of each byte, in order."""
    found = []
    for copies in form.copies:
        blocks = np.zeros_like(copies.image) if copies.block is None else copies.block
        for image, local, block in zip(copies.image, copies.local, blocks, strict=True):
            found += [(int(block), int(local) + i, int(image) + i) for i in range(copies.length)]
    return sorted(found)


def bytes_of_patterns(patterns: list[CopyPattern]) -> list[tuple[int, int, int]]:
    found = []
    for one in patterns:
        for plane in range(one.planes):
            for row in range(one.rows):
                local = one.local + plane * one.local_plane + row * one.local_pitch
                image = one.image + plane * one.image_plane + row * one.image_pitch
                found += [(one.block, local + i, image + i) for i in range(one.width)]
    return sorted(found)


def check_drivers_rules(patterns: list[CopyPattern], max_pitch: int) -> None:
    for one in patterns:
        if one.rows > 1:
            assert one.width <= min(one.image_pitch, one.local_pitch)
            assert max(one.image_pitch, one.local_pitch) <= max_pitch
        if one.planes > 1:
            assert not one.image_plane % one.image_pitch
            assert not one.local_plane % one.local_pitch
            assert one.image_plane >= one.rows * one.image_pitch
            assert one.local_plane >= one.rows * one.local_pitch


def heads_and_tokens(tokens: int, heads: int, size: int) -> list[tuple[int, int, int, int]]:
    """Heads first in the image, tokens first here."""
    return [
        (size, (head * tokens + token) * size, (token * heads + head) * size, 0)
        for head in range(heads)
        for token in range(tokens)
    ]


@pytest.mark.parametrize(
    ("tokens", "heads", "num"),
    [(16, 2, 2), (16, 8, 8), (4, 8, 4), (16, 1, 1), (1, 8, 1)],
)
def test_a_permutation_needs_as_many_copies_as_its_shorter_side(tokens: int, heads: int, num: int) -> None:
    form = form_of(heads_and_tokens(tokens, heads, 256))
    patterns = form_patterns(form, MAX_PITCH)
    assert patterns is not None
    assert len(patterns) == num
    assert bytes_of_patterns(patterns) == bytes_of_form(form)


def test_layers_become_planes() -> None:
    one = heads_and_tokens(16, 2, 64)
    layers = [
        (size, image + layer * 16 * 2 * 64, local + layer * 40 * 2 * 64, 0)
        for layer in range(10)
        for size, image, local, _ in one
    ]
    patterns = form_patterns(form_of(layers), MAX_PITCH)
    assert patterns is not None
    assert [(one.rows, one.planes) for one in patterns] == [(16, 10)] * 2
    assert bytes_of_patterns(patterns) == bytes_of_form(form_of(layers))


def test_what_is_not_regular_has_no_patterns() -> None:
    rng = np.random.default_rng(1)
    places = rng.permutation(4096)
    form = form_of([(8, 16 * i, 16 * int(place), 0) for i, place in enumerate(places)])
    assert form_patterns(form, MAX_PITCH) is None


def test_pitches_stay_below_the_devices_longest() -> None:
    form = form_of([(16, 16 * i, 1000 * i, 0) for i in range(6)])
    few, many = form_patterns(form, 1000), form_patterns(form, 999)
    assert few is not None
    assert many is not None
    assert (len(few), len(many)) == (1, 6)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_patterns_write_what_the_copies_write(data: st.DataObject) -> None:
    """Regular parts, of several sizes and blocks, in odd places, and some copies left out."""
    num_blocks = data.draw(st.integers(1, 3))
    copies: list[tuple[int, int, int, int]] = []
    for _ in range(data.draw(st.integers(1, 3))):
        size = data.draw(st.sampled_from([1, 3, 8, 16]))
        inner, outer = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
        image_at = max((one[1] + one[0] for one in copies), default=0) + data.draw(st.integers(0, 3))
        local_at = max((one[2] + one[0] for one in copies), default=0) + data.draw(st.integers(0, 3))
        gap, is_crossed = data.draw(st.integers(0, 5)), data.draw(st.booleans())
        step = size + gap
        left_out = data.draw(st.tuples(st.integers(0, 9), st.integers(0, 4)))
        far = data.draw(st.integers(0, num_blocks - 1))
        for i in range(outer):
            for j in range(inner):
                if left_out != (i, j):
                    place = (j * outer + i) if is_crossed else (i * inner + j)
                    copies.append(
                        (
                            size,
                            image_at + (i * inner + j) * size,
                            local_at + place * step,
                            far if gap != 5 else (i * 7 + j) % num_blocks,
                        )
                    )
    if not copies:
        return
    form = form_of(copies, num_blocks)
    max_pitch = data.draw(st.sampled_from([16, 40, MAX_PITCH]))
    patterns = form_patterns(form, max_pitch)
    assert patterns is not None
    assert bytes_of_patterns(patterns) == bytes_of_form(form)
    assert len(patterns) <= form.num_copies
    check_drivers_rules(patterns, max_pitch)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=30))
def test_progressions_hold_each_item_once(pairs: list[tuple[int, int]]) -> None:
    first, second = (int64s([pair[side] for pair in pairs]) for side in (0, 1))
    found = progressions(first, second, lambda a, b: a > 0 and b > 0, 100)
    assert found is not None
    items = []
    for one in found:
        for number in range(one.num_items):
            item = one.start + number
            items.append(item)
            assert first[item] == first[one.start] + number * one.first_step
            assert second[item] == second[one.start] + number * one.second_step
    assert items == list(range(len(pairs)))
