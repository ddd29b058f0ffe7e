"""Copies of rows, as `Driver.copy_rows` makes them: shapes, and what they leave."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import pytest

from kvxferd.memory.driver import PAIRS_PER_LAUNCH, Rows

# Rows, and offsets (to, source) of the pairs; none leaves so many bytes.
SIZE_BYTES = 96 << 10
SHAPES = [
    pytest.param(Rows(5000), [(0, 0)], id="one row of more than a piece"),
    pytest.param(
        Rows(16),
        [(16 * (i * 7 % (2 * PAIRS_PER_LAUNCH + 1)), 16 * i) for i in range(2 * PAIRS_PER_LAUNCH + 1)],
        id="three launches",
    ),
    pytest.param(Rows(256, 16, 512, 256), [(0, 0), (256, 4096), (16384, 8192)], id="heads into tokens"),
    pytest.param(Rows(96, 5, 288, 96), [(4, 8), (1500, 3000)], id="words of four bytes"),
    pytest.param(Rows(64, 4, 64, 128), [(3, 16), (259, 1024)], id="only one side aligned"),
    pytest.param(Rows(7, 9, 13, 11), [(0, 1), (500, 3), (201, 900)], id="no alignment at all"),
    pytest.param(Rows(1, 3, 1, 5), [(9, 2)], id="single bytes"),
    pytest.param(Rows(8200, 3, 8208, 9000), [(1, 0), (30000, 27000)], id="long rows without alignment"),
    pytest.param(Rows(32, 8, -32, 64), [(224, 0), (1224, 512)], id="backwards"),
    pytest.param(Rows(48, 3, 1 << 15, 48), [(0, 0), (48, 144)], id="long pitches"),
]


def addresses(of: Iterable[int]) -> memoryview:
    """Return addresses as a driver takes them."""
    return memoryview(array("Q", of))


def copied(rows: Rows, pairs: Sequence[tuple[int, int]], content: bytes, before: bytes) -> bytes:
    """Return what memory that held `before` holds after copies from memory that holds `content`."""
    after = bytearray(before)
    for to, source in pairs:
        for row in range(rows.rows):
            at, start = to + row * rows.to_pitch, source + row * rows.source_pitch
            after[at : at + rows.width] = content[start : start + rows.width]
    return bytes(after)
