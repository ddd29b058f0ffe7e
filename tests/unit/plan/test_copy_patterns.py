"""Forms as rows: how few there are, and that they write exactly what the form's copies write."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxferd.plan.copy_patterns import CopyPattern, form_patterns
from kvxferd.plan.stretches import Copies, StretchForm


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
        for place in zip(one.image, one.local, one.block, strict=True):
            image, local, block = (int(number) for number in place)
            for row in range(one.rows):
                to, source = local + row * one.local_pitch, image + row * one.image_pitch
                found += [(block, to + i, source + i) for i in range(one.width)]
    return sorted(found)


def heads_and_tokens(tokens: int, heads: int, size: int) -> list[tuple[int, int, int, int]]:
    """Heads first in the image, tokens first here."""
    return [
        (size, (head * tokens + token) * size, (token * heads + head) * size, 0)
        for head in range(heads)
        for token in range(tokens)
    ]


@pytest.mark.parametrize(
    ("tokens", "heads", "rows"),
    [(16, 2, 16), (16, 8, 16), (4, 8, 8), (16, 1, 16), (1, 8, 8), (1, 1, 1)],
)
def test_a_permutation_has_rows_of_its_longer_side(tokens: int, heads: int, rows: int) -> None:
    form = form_of(heads_and_tokens(tokens, heads, 256))
    (pattern,) = form_patterns(form)
    assert (pattern.rows, len(pattern.image)) == (rows, tokens * heads // rows)
    assert bytes_of_patterns([pattern]) == bytes_of_form(form)


def test_rows_end_where_a_local_block_does() -> None:
    """12 against 16 tokens: four of the one block, and twelve of the other, are rows of four."""
    copies = [
        (64, (head * 16 + token) * 64, ((token + 8) % 12 * 4 + head) * 64, int(token >= 4))
        for head in range(4)
        for token in range(16)
    ]
    form = form_of(copies, num_blocks=2)
    (pattern,) = form_patterns(form)
    assert (pattern.rows, len(pattern.image)) == (4, 16)
    assert bytes_of_patterns([pattern]) == bytes_of_form(form)


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
    patterns = form_patterns(form)
    assert bytes_of_patterns(patterns) == bytes_of_form(form)
    assert len(patterns) == len(form.copies)
