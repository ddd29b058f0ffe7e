"""A mover's requests to its daemon about lost connections; `kvxferd.mover.disconnects` holds the rule."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvxferd.wire.mover import DisconnectSeen, FromMover


class DisconnectRequests:
    """A mover's requests to the daemon: are the reads of a lost connection over? One thread."""

    def __init__(self, outbox: deque[FromMover] | None = None) -> None:
        self.outbox: deque[FromMover] = deque() if outbox is None else outbox
        self._waiting: dict[int, Callable[[bool], None]] = {}
        self._last_number = 0

    def request(self, on_reply: Callable[[bool], None]) -> None:
        """Ask whether the reads of a connection that was just lost are over. `on_reply` is called once."""
        self._last_number += 1
        self._waiting[self._last_number] = on_reply
        self.outbox.append(DisconnectSeen(number=self._last_number))

    def handle_reply(self, number: int, over: bool) -> None:
        """Pass the daemon's reply on. A reply without a request is ignored."""
        on_reply = self._waiting.pop(number, None)
        if on_reply is not None:
            on_reply(over)
