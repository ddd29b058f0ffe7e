"""The file descriptors that came with one frame, until their owner is decided."""

from __future__ import annotations

from kvxferd.frame_socket import close_fds


class FrameFds:
    """Owns the descriptors of a frame. A new owner detaches a descriptor; `close` closes the rest.

    So each has one owner at any time. A descriptor closed twice may by then be another file, or a socket of
    libzmq, which aborts the process when it finds its socket closed.
    """

    def __init__(self, fds: tuple[int, ...]) -> None:
        self._fds = fds

    def __len__(self) -> int:
        return len(self._fds)

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors that are still owned here: to be inspected, not kept."""
        return self._fds

    def prepend(self, fds: tuple[int, ...]) -> None:
        """Own these too, in front of the others."""
        self._fds = (*fds, *self._fds)

    def detach_all(self) -> tuple[int, ...]:
        """Return all that are left; the caller owns them now."""
        taken, self._fds = self._fds, ()
        return taken

    def detach_last(self) -> int:
        """Return the last one; the caller owns it now."""
        *rest, last = self._fds
        self._fds = tuple(rest)
        return last

    def close(self) -> None:
        """Close those that were not detached. Idempotent."""
        if self._fds:
            close_fds(self.detach_all())
