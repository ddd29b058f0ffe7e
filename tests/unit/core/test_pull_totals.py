"""What the pieces of a pull add up to, whatever a resident mover reports."""

from __future__ import annotations

import pytest

from kvxferd.core.pull_totals import MAX_REPORTED, NOTHING_READ, add_piece, pieces_read
from kvxferd.wire.mover import PiecesRead, PullOutcome

PIECE = PullOutcome(
    delivered=True, bytes=100, runs=3, queue_s=0.125, expand_s=0.25, post_s=0.5, wire_s=1.0, fence_s=2.0,
    covered_bytes=10, predicted_s=4.0,
)  # fmt: skip


def test_sizes_and_times_are_added() -> None:
    total = add_piece(add_piece(NOTHING_READ, PIECE), PIECE)
    assert (total.bytes, total.runs, total.covered_bytes) == (200, 6, 20)
    times = (total.queue_s, total.expand_s, total.post_s, total.wire_s, total.fence_s, total.predicted_s)
    assert times == (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
    assert pieces_read(total) == PiecesRead(bytes=200, runs=6, wire_s=2.0)


def test_the_first_piece_has_none_before_it() -> None:
    assert pieces_read(NOTHING_READ) is None


@pytest.mark.parametrize("time", [float("nan"), float("inf"), -1.0, 1e9])
def test_impossible_times_count_as_none(time: float) -> None:
    total = add_piece(add_piece(NOTHING_READ, PIECE), PullOutcome(delivered=True, wire_s=time, fence_s=time))
    assert (total.wire_s, total.fence_s) == (1.0, 2.0)


@pytest.mark.parametrize(("size", "counted"), [(-1, 0), (-(1 << 63), 0), ((1 << 63) - 1, MAX_REPORTED)])
def test_impossible_sizes_are_limited(size: int, counted: int) -> None:
    """Their sum is sent to the source's daemon: it must remain a number that a message can hold."""
    total = add_piece(NOTHING_READ, PullOutcome(delivered=True, bytes=size, runs=size, covered_bytes=size))
    assert (total.bytes, total.runs, total.covered_bytes) == (counted, counted, counted)
