"""The socket on which a rank's mover reports deliveries to the worker itself, past the daemon."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from kvxferd.wire import worker
from kvxferd.wire.codec import MOVER_DELIVERIES
from kvxferd.wire.limits import MAX_NOTICE_BYTES


class DeliverySocketPair:
    """A pair of sockets: movers write into one, this process reads the other. Never blocks."""

    def __init__(self) -> None:
        self._read_end, self._write_end = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )

    @property
    def mover_fd(self) -> int:
        """The descriptor that goes to the daemon. Kept open: the next daemon gets it too."""
        return self._write_end.fileno()

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are deliveries."""
        return self._read_end.fileno()

    def receive(self) -> Iterator[worker.Delivered]:
        """Yield the deliveries that have come, oldest first. Raises ProtocolError for any other packet.

        Only this side ends the stream: the far end is open here too, so an empty read is an empty packet.
        """
        while self._read_end.fileno() >= 0:
            try:
                packet = self._read_end.recv(MAX_NOTICE_BYTES)
            except BlockingIOError:
                return
            yield MOVER_DELIVERIES.decode(packet)

    def close(self) -> None:
        """Close both ends. Idempotent."""
        self._read_end.close()
        self._write_end.close()
