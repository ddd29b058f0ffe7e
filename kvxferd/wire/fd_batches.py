"""File descriptors beyond a frame's limit: sent ahead in batches, and collected under a limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvxferd.errors import ProtocolError
from kvxferd.wire.common import FdBatch
from kvxferd.wire.limits import MAX_DESCRIPTORS_PER_RANK, MAX_FDS_PER_FRAME


def leading_fd_batches(fds: Sequence[int]) -> Iterator[tuple[FdBatch, tuple[int, ...]]]:
    """Return the batches to send before the message that needs the descriptors; nearly always none."""
    return split_fds(fds[: start_of_last_batch(len(fds))])


def split_fds(fds: Sequence[int], num_before: int = 0) -> Iterator[tuple[FdBatch, tuple[int, ...]]]:
    """Yield all descriptors in batches, where `num_before` others were sent before them."""
    for start in range(0, len(fds), MAX_FDS_PER_FRAME):
        yield FdBatch(first=num_before + start), tuple(fds[start : start + MAX_FDS_PER_FRAME])


def start_of_last_batch(num_fds: int) -> int:
    """Return the position of the first descriptor that the message itself carries."""
    return max(0, num_fds - 1) // MAX_FDS_PER_FRAME * MAX_FDS_PER_FRAME


class FdBatchAssembly:
    """Keeps the batches of one connection until the message that needs them. It closes nothing."""

    def __init__(self) -> None:
        self._fds: list[int] = []

    def __len__(self) -> int:
        return len(self._fds)

    def add(self, first: int, fds: Sequence[int]) -> tuple[int, ...]:
        """Keep a batch. Return the descriptors of an earlier start, which the caller closes.

        If it raises ProtocolError it keeps what it had, and the caller still owns the batch.
        """
        num_before = 0 if first == 0 else len(self._fds)
        if first != num_before or not fds:
            raise ProtocolError(
                f"cannot place {len(fds)} descriptors after {first}: {len(self._fds)} came before"
            )
        if first + len(fds) > MAX_DESCRIPTORS_PER_RANK:
            raise ProtocolError(f"cannot take more than {MAX_DESCRIPTORS_PER_RANK} descriptors for one rank")
        # After every check: with an error the caller does not get the descriptors of an earlier start.
        replaced = self.pop_all() if first == 0 else ()
        self._fds.extend(fds)
        return replaced

    def pop_all(self) -> tuple[int, ...]:
        """Return and remove the descriptors; the caller owns them from here on."""
        taken, self._fds = tuple(self._fds), []
        return taken
