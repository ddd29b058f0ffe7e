"""What a daemon tells a worker, checked where it is said: a client hides some of it."""

from __future__ import annotations

from kvxferd.wire import worker as wk
from kvxferd.wire.common import Message


class ToldWorker:
    """What a daemon has said over one connection: each pull ends once, each transfer is released once."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._ended: dict[int, bool] = {}  # by ticket: whether its blocks are safe
        self._released: set[str] = set()

    def check(self, message: Message) -> None:
        """Check the next message. Raises AssertionError."""
        match message:
            case wk.TicketDelivered() | wk.TicketFailed():
                assert message.ticket not in self._ended, (
                    f"{self._name} is told twice of the end of {message.ticket}"
                )
                self._ended[message.ticket] = isinstance(message, wk.TicketDelivered) or message.safe_to_reuse
            case wk.TicketQuiesced():
                text = f"{self._name} is told that {message.ticket} is quiet, which was safe before"
                assert not self._ended.get(message.ticket, True), text
                self._ended[message.ticket] = True
            case wk.Released():
                text = f"{self._name} is told twice that {message.transfer_id} is released"
                assert message.transfer_id not in self._released, text
                self._released.add(message.transfer_id)
