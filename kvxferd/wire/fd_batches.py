"""More file descriptors than a frame carries: sent ahead in parts, put together under a limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvxferd.errors import ProtocolError
from kvxferd.wire.common import FdBatch
from kvxferd.wire.limits import MAX_DESCRIPTORS_PER_RANK, MAX_FDS_PER_FRAME


def leading_fd_batches(fds: Sequence[int]) -> Iterator[tuple[FdBatch, tuple[int, ...]]]:
    """Yield what to send before the message that the descriptors belong to; nothing, nearly always."""
    for first in range(0, start_of_last_batch(len(fds)), MAX_FDS_PER_FRAME):
        yield FdBatch(first=first), tuple(fds[first : first + MAX_FDS_PER_FRAME])


def start_of_last_batch(num_fds: int) -> int:
    """Return the position of the first descriptor that the message itself carries."""
    return max(0, num_fds - 1) // MAX_FDS_PER_FRAME * MAX_FDS_PER_FRAME


class FdBatchAssembly:
    """Keeps the parts of one connection until the message that needs them. Closes nothing."""

    def __init__(self) -> None:
        self._fds: list[int] = []

    def __len__(self) -> int:
        return len(self._fds)

    def add(self, first: int, fds: Sequence[int]) -> tuple[int, ...]:
        """Keep a part. Returns those of an earlier start, to be closed.

        Raises ProtocolError, and then keeps what it had: the part is still the caller's.
        """
        num_before = 0 if first == 0 else len(self._fds)
        if first != num_before or not fds:
            raise ProtocolError(
                f"cannot place {len(fds)} descriptors after {first}: {len(self._fds)} came before"
            )
        if first + len(fds) > MAX_DESCRIPTORS_PER_RANK:
            raise ProtocolError(f"cannot take more than {MAX_DESCRIPTORS_PER_RANK} descriptors for one rank")
        # After every check: whoever gets an error does not get what an earlier start left.
        replaced = self.pop_all() if first == 0 else ()
        self._fds.extend(fds)
        return replaced

    def pop_all(self) -> tuple[int, ...]:
        """Return what was kept; it is the caller's now."""
        taken, self._fds = tuple(self._fds), []
        return taken
