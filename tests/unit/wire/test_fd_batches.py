"""More descriptors than a frame carries."""

from __future__ import annotations

import pytest

from kvxferd.errors import ProtocolError
from kvxferd.wire.fd_batches import FdBatchAssembly, leading_fd_batches, start_of_last_batch
from kvxferd.wire.limits import MAX_DESCRIPTORS_PER_RANK, MAX_FDS_PER_FRAME

FULL = MAX_FDS_PER_FRAME


@pytest.mark.parametrize(
    ("count", "ahead", "left"),
    [
        (0, [], 0),
        (1, [], 1),
        (FULL, [], FULL),  # all in the message's own frame
        (FULL + 1, [FULL], 1),
        (3 * FULL, [FULL, FULL], FULL),
    ],
)
def test_parts_and_what_is_left_are_all_in_order(count: int, ahead: list[int], left: int) -> None:
    fds = list(range(count))
    parts = list(leading_fd_batches(fds))
    assert [len(part) for _, part in parts] == ahead
    assert len(fds[start_of_last_batch(count) :]) == left
    early = FdBatchAssembly()
    for message, part in parts:
        assert early.add(message.first, part) == ()
    assert [*early.pop_all(), *fds[start_of_last_batch(count) :]] == fds
    assert early.pop_all() == ()


def test_a_new_start_gives_the_old_ones_back() -> None:
    early = FdBatchAssembly()
    early.add(0, (5, 6))
    assert early.add(0, (7,)) == (5, 6)
    assert early.pop_all() == (7,)


@pytest.mark.parametrize(("first", "fds"), [(1, (5,)), (-1, (5,)), (3, (5,)), (2, ()), (0, ())])
def test_a_gap_or_nothing_at_all_is_refused(first: int, fds: tuple[int, ...]) -> None:
    early = FdBatchAssembly()
    early.add(0, (1, 2))
    with pytest.raises(ProtocolError):
        early.add(first, fds)
    assert early.pop_all() == (1, 2)


def test_there_is_a_limit() -> None:
    early = FdBatchAssembly()
    whole = MAX_DESCRIPTORS_PER_RANK // FULL * FULL
    for first in range(0, whole, FULL):
        early.add(first, range(FULL))
    with pytest.raises(ProtocolError):
        early.add(whole, range(FULL))


def test_a_new_start_beyond_the_limit_loses_nothing() -> None:
    early = FdBatchAssembly()
    early.add(0, (1, 2))
    with pytest.raises(ProtocolError):
        early.add(0, range(MAX_DESCRIPTORS_PER_RANK + 1))
    assert early.pop_all() == (1, 2)
