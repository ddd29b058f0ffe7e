"""What a rank's mover tells the worker itself, past the daemon: that a pull is delivered."""

from __future__ import annotations

import contextlib
import socket

from kvxferd.wire import worker
from kvxferd.wire.codec import NOTICES
from kvxferd.wire.limits import MAX_NOTICE_BYTES


class Notices:
    """A pair of sockets: movers write into one, this process reads the other. Never blocks."""

    def __init__(self) -> None:
        self._here, self._there = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )

    @property
    def far_end(self) -> int:
        """The descriptor that goes to the daemon. Kept open: the next daemon gets it too."""
        return self._there.fileno()

    def fileno(self) -> int:
        """Return a descriptor that is readable while there is something to take."""
        return self._here.fileno()

    def take(self) -> list[worker.Delivered]:
        """Return what has come, oldest first. Raises ProtocolError for anything else than that."""
        came: list[worker.Delivered] = []
        if self._here.fileno() < 0:
            return came
        with contextlib.suppress(BlockingIOError):
            # Nobody ends it but this side: the far end is open here too, so an empty read is an empty packet.
            while True:
                came.append(NOTICES.decode(self._here.recv(MAX_NOTICE_BYTES)))
        return came

    def close(self) -> None:
        """Close both ends. Idempotent."""
        self._here.close()
        self._there.close()
