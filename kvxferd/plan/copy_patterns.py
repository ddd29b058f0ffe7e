"""A form's copies as few strided patterns, for drivers that copy rows of equal distance in one call.

A driver's 2D copy moves `rows` of `width` bytes, each `pitch` after the one before, with one pitch for each
side; a 3D copy moves `planes` of these, and a plane begins a whole number of rows after the one before. No
pitch is shorter than a row, and no plane begins inside another. Tokens and heads change places in a form, so
one of them becomes the rows, and the other stays a pattern each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from kvxferd.plan.run_shapes import Int64s, distinct
from kvxferd.plan.stretches import StretchForm

# A form of more is not regular. Each is 200 bytes here, and one call of the driver for each stretch.
MAX_PATTERNS = 256

MAX_PERIOD = 64  # heads of a layer that are looked for in the next

Fits = Callable[[int, int], bool]  # whether a driver takes these two distances


class CopyPattern(NamedTuple):
    """Rows of one form, at equal distances on both sides."""

    image: int  # offset of the first row in the stretch's image
    local: int  # offset of the first row from the stretch's origin in its local block
    block: int  # which of the local blocks
    width: int
    rows: int = 1
    image_pitch: int = 0
    local_pitch: int = 0
    planes: int = 1
    image_plane: int = 0  # a multiple of `image_pitch`
    local_plane: int = 0


class Progression(NamedTuple):
    """Consecutive items whose two offsets grow by the same two distances."""

    start: int  # of the items as they were given
    num_items: int
    first_step: int
    second_step: int


def form_patterns(form: StretchForm, max_pitch: int, limit: int = MAX_PATTERNS) -> list[CopyPattern] | None:
    """Return patterns that write each byte of the form's copies once; None: more than `limit`."""
    patterns: list[CopyPattern] = []
    for copies in form.copies:
        for block in (0,) if copies.block is None else distinct(copies.block).tolist():
            chosen = slice(None) if copies.block is None else copies.block == block
            found = _rows(copies.image[chosen], copies.local[chosen], copies.length, block, max_pitch, limit)
            if found is None or len(patterns) + len(found) > 4 * limit:
                return None
            patterns += found
    patterns = _planes(patterns)
    return patterns if len(patterns) <= limit else None


def _rows(
    image: Int64s, local: Int64s, width: int, block: int, max_pitch: int, limit: int
) -> list[CopyPattern] | None:
    def fits(first: int, second: int) -> bool:
        return width <= first <= max_pitch and width <= second <= max_pitch

    found = _fewest(image, local, fits, 4 * limit)
    if found is None:
        return None
    patterns = []
    for at, to, (_, count, step, local_step) in found:
        if step == local_step == width:  # they touch on both sides
            patterns.append(CopyPattern(at, to, block, width * count))
        else:
            patterns.append(CopyPattern(at, to, block, width, count, step, local_step))
    return patterns


def _planes(patterns: list[CopyPattern]) -> list[CopyPattern]:
    """Return the same rows, patterns of equal rows joined to planes."""
    alike: dict[tuple[int, ...], list[CopyPattern]] = {}
    for one in patterns:
        alike.setdefault(one[2:7], []).append(one)
    joined = []
    for first, *others in alike.values():
        if first.rows == 1 or not others:
            joined += [first, *others]
            continue
        members = [first, *others]
        image, local = (np.array([one[column] for one in members], dtype=np.int64) for column in (0, 1))
        fits = plane_fits(first)
        found = _fewest(image, local, fits, len(members))
        assert found is not None
        interleaved = _interleaved(image, local, fits)
        if interleaved is not None and len(interleaved) < len(found):
            found = interleaved
        for at, to, (_, count, step, local_step) in found:
            planes = (count, step, local_step) if count > 1 else (1, 0, 0)
            joined.append(CopyPattern(at, to, *first[2:7], *planes))
    return joined


def plane_fits(rows: CopyPattern) -> Fits:
    """Return whether a driver takes two distances as those between planes of such rows."""

    def fits(first: int, second: int) -> bool:
        return (
            first >= rows.rows * rows.image_pitch
            and second >= rows.rows * rows.local_pitch
            and not first % rows.image_pitch
            and not second % rows.local_pitch
        )

    return fits


def _interleaved(image: Int64s, local: Int64s, fits: Fits) -> list[tuple[int, int, Progression]] | None:
    """Return progressions of every n-th item, for the least n by which all steps repeat; None: there is none.

    The heads of a layer, each a pattern, come again in the next layer.
    """
    order = np.argsort(image, kind="stable")
    image, local = image[order], local[order]
    steps = np.stack([np.diff(image), np.diff(local)], axis=1)
    for period in range(2, min(MAX_PERIOD, len(image) // 2) + 1):
        if (steps[period:] == steps[:-period]).all():
            step, other = steps[:period].sum(axis=0).tolist()
            if not fits(step, other):
                return None
            return [
                (
                    int(image[start]),
                    int(local[start]),
                    Progression(start, len(image[start::period]), step, other),
                )
                for start in range(period)
            ]
    return None


def _fewest(
    image: Int64s, local: Int64s, fits: Fits, limit: int
) -> list[tuple[int, int, Progression]] | None:
    """Return both first offsets of each progression, in the order of either side, whichever needs fewer."""
    best: list[tuple[int, int, Progression]] | None = None
    for order in (np.argsort(image, kind="stable"), np.argsort(local, kind="stable")):
        first, second = image[order], local[order]
        found = progressions(first, second, fits, limit)
        if found is not None and (best is None or len(found) < len(best)):
            best = [(int(first[one.start]), int(second[one.start]), one) for one in found]
    return best


def progressions(first: Int64s, second: Int64s, fits: Fits, limit: int) -> list[Progression] | None:
    """Return progressions that hold each item once, in order; None where there are more than `limit`.

    A single item is a progression of one, whose steps are 0.
    """
    if len(first) < 2:
        return _singles(range(len(first)))
    steps = np.stack([np.diff(first), np.diff(second)], axis=1)
    is_begin = np.ones(len(steps), dtype=bool)
    is_begin[1:] = (steps[1:] != steps[:-1]).any(axis=1)
    (begins,) = is_begin.nonzero()
    if len(begins) > 2 * limit:  # a progression ends two runs of equal steps at most
        return None
    found: list[Progression] = []
    at = 0  # the first item that is in none
    ends = np.append(begins[1:], len(steps))
    for begin, end, (step, other) in zip(begins.tolist(), ends.tolist(), steps[begins].tolist(), strict=True):
        start = max(begin, at)
        if end > start and fits(step, other):
            found += _singles(range(at, start))
            found.append(Progression(start, end + 1 - start, step, other))
            at = end + 1
    found += _singles(range(at, len(first)))
    return found if len(found) <= limit else None


def _singles(items: Iterable[int]) -> list[Progression]:
    return [Progression(item, 1, 0, 0) for item in items]
