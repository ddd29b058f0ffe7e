"""What a rank's mover tells the worker itself, past the daemon: that a pull is delivered."""

from __future__ import annotations

import socket
from collections.abc import Iterator

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

    def take(self) -> Iterator[worker.Delivered]:
        """Yield what has come, oldest first. Raises ProtocolError at anything else than that.

        Nobody ends it but this side: the far end is open here too, so an empty read is an empty packet.
        """
        while self._here.fileno() >= 0:
            try:
                packet = self._here.recv(MAX_NOTICE_BYTES)
            except BlockingIOError:
                return
            yield NOTICES.decode(packet)

    def close(self) -> None:
        """Close both ends. Idempotent."""
        self._here.close()
        self._there.close()
