"""What a daemon tells a worker, checked where it is told: a client hides some of it."""

from __future__ import annotations

from kvxferd.wire import worker as wk
from kvxferd.wire.common import Message


class ToldWorker:
    """What a daemon has told over one connection: each pull ends once, each transfer is released once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._ended: dict[int, bool] = {}  # by ticket: whether its blocks are safe
        self._released: set[str] = set()

    def check(self, message: Message) -> None:
        """Check the next message. Raises AssertionError."""
        match message:
            case wk.TicketDelivered() | wk.TicketFailed():
                is_first = message.ticket not in self._ended
                assert is_first, f"{self._name} is told twice of the end of {message.ticket}"
                self._ended[message.ticket] = isinstance(message, wk.TicketDelivered) or message.safe_to_reuse
            case wk.TicketQuiesced():
                was_safe = self._ended.get(message.ticket, True)
                assert not was_safe, f"{self._name} is told that {message.ticket} is quiet, which was safe"
                self._ended[message.ticket] = True
            case wk.Released():
                is_first = message.transfer_id not in self._released
                assert is_first, f"{self._name} is told twice that {message.transfer_id} is released"
                self._released.add(message.transfer_id)
