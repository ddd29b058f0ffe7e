"""A form's copies as equal rows, of which one call of a GPU's driver copies many.

Tokens and heads change places in a form: head after head in the image, the tokens of one head lie at equal
distances on both sides. These are rows, and the heads, layers and blocks are the places where rows begin.
Places need no order: a driver takes the addresses of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvxferd.plan.run_shapes import Int64s
from kvxferd.plan.stretches import Copies, StretchForm


class CopyPattern(NamedTuple):
    """Copies of one length, as `rows` from each of several places: arrays of one entry for each place."""

    width: int  # bytes of a row
    rows: int
    image_pitch: int  # from one row to the next; 0 where there is one
    local_pitch: int
    image: Int64s  # offset of the first row in the stretch's image
    local: Int64s  # offset of the first row from the stretch's origin in its local block
    block: Int64s  # which of the local blocks

    def split(self, max_places: int) -> Iterator[CopyPattern]:
        """Yield patterns of so many places at most, of this one's in order."""
        for start in range(0, len(self.image), max_places):
            part = slice(start, start + max_places)
            yield self._replace(image=self.image[part], local=self.local[part], block=self.block[part])


def form_patterns(form: StretchForm) -> list[CopyPattern]:
    """Return patterns that write each byte of the form's copies once: one for each length of copies."""
    return [_longest_rows(copies) for copies in form.copies]


def _longest_rows(copies: Copies) -> CopyPattern:
    """Return rows that follow the order of either side, whichever has fewer places."""
    block = np.zeros_like(copies.image) if copies.block is None else copies.block
    places = np.stack([copies.image, copies.local, block])
    by_local = places[:, np.lexsort((copies.local, block))]
    return max((_rows(copies.length, places), _rows(copies.length, by_local)), key=lambda one: one.rows)


def _rows(width: int, places: Int64s) -> CopyPattern:
    """`places`: image, local and block of each copy, (3, copies)."""
    steps = np.diff(places)
    (breaks,) = (steps != steps[:, :1]).any(axis=0).nonzero()
    # Rows of this many copies end at each break, so that all steps inside of them are the first one.
    rows = int(np.gcd.reduce(np.append(breaks + 1, places.shape[1])))
    image_pitch, local_pitch, next_block = steps[:, 0].tolist() if rows > 1 else (0, 0, 0)
    if next_block:
        rows, image_pitch, local_pitch = 1, 0, 0
    return CopyPattern(width, rows, image_pitch, local_pitch, *np.ascontiguousarray(places[:, ::rows]))
