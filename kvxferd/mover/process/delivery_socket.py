"""What a mover tells its worker itself: that a pull is delivered. All else the daemon says."""

from __future__ import annotations

import socket

from kvxferd.wire.codec import encode
from kvxferd.wire.worker import Delivered


class DeliverySocket:
    """The writing end of a worker's notices; owns the descriptor."""

    def __init__(self, fd: int) -> None:
        """Raises OSError where it is no socket; the descriptor is then still the caller's."""
        self._socket = socket.socket(fileno=fd)

    def send(self, delivered: Delivered) -> bool:
        """Return whether the worker will read it; never waits. If not, it has many that it has not read."""
        try:
            self._socket.send(encode(delivered), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close it. Idempotent."""
        self._socket.close()
