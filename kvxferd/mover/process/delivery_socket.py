"""The socket by which a mover reports deliveries to its worker itself. The daemon sends all else."""

from __future__ import annotations

import socket

from kvxferd.wire.codec import encode
from kvxferd.wire.worker import Delivered


class DeliverySocket:
    """The writing end of a worker's delivery socket; owns the descriptor."""

    def __init__(self, fd: int) -> None:
        """Raises OSError where it is no socket; the descriptor is then still the caller's."""
        self._socket = socket.socket(fileno=fd)

    def send(self, delivered: Delivered) -> bool:
        """Return whether it was sent; never waits. False where the worker has too many unread, or is gone."""
        try:
            self._socket.send(encode(delivered), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close it. Idempotent."""
        self._socket.close()
