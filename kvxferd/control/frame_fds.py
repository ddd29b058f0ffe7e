"""The descriptors of one frame, until somebody keeps them."""

from __future__ import annotations

from kvxferd.frame_socket import close_fds


class FrameFds:
    """Owns what came with a frame. Whoever keeps a descriptor takes it out; `close` closes what is left.

    So each has one owner at any moment. A number that two close is by the second time somebody else's:
    a file, or a socket of libzmq, which ends the process by abort where it finds it closed.
    """

    def __init__(self, fds: tuple[int, ...]) -> None:
        self._fds = fds

    def __len__(self) -> int:
        return len(self._fds)

    @property
    def fds(self) -> tuple[int, ...]:
        """Those that nobody has taken: to be looked at, not kept."""
        return self._fds

    def prepend(self, fds: tuple[int, ...]) -> None:
        """Own these too, ahead of the others."""
        self._fds = (*fds, *self._fds)

    def detach_all(self) -> tuple[int, ...]:
        """Return all that are left; they are the caller's now."""
        taken, self._fds = self._fds, ()
        return taken

    def detach_last(self) -> int:
        """Return the last one; it is the caller's now."""
        *rest, last = self._fds
        self._fds = tuple(rest)
        return last

    def close(self) -> None:
        """Close what nobody has taken. Idempotent."""
        if self._fds:
            close_fds(self.detach_all())
