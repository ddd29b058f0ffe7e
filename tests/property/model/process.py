"""An engine's process: a rank or its scheduler, with its memory, its fence page and the real client session.

What its I/O thread would do is done by the host; nothing here knows of sockets.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

from kvxferd.client.events import Event
from kvxferd.client.fence_slots import FenceSlots
from kvxferd.client.memory_export import MemoryExport
from kvxferd.client.registration import PublisherRole, RankRole, SessionRole
from kvxferd.client.session import ClientSession
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.wire import worker as wk
from kvxferd.wire.common import Message
from kvxferd.wire.worker import RegionExport

OVERWRITTEN = bytes(16)
NUM_SLOTS = 2  # of a fence page: one transfer at a time, and one that follows it


class Page:
    """A fence page. A process numbers the words of all of its own: a replay must write the same ones."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self.words: dict[int, bytes] = {}
        self._numbers = numbers

    def write(self, slot: int, word: bytes) -> None:
        """Put a fresh word in `slot`, not the random one that is given."""
        self.words[slot] = bytes([next(self._numbers)]) * len(word)

    def read(self, slot: int) -> bytes:
        """Return the word in `slot`."""
        return self.words[slot]

    def overwrite(self, slot: int) -> None:
        """Make the word in `slot` another one."""
        self.words[slot] = OVERWRITTEN

    def close(self) -> None:
        """Nothing is mapped."""


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


class Process:
    """See the module. Blocks hold the number of the transfer whose bytes they have, 0 for other ones."""

    def __init__(self, number: int, name: str, num_blocks: int) -> None:
        self.number = number
        self.name = name
        self.memory = [0] * num_blocks
        self.is_alive = True
        self.layout: RankLayout | None = None  # None: a scheduler
        self.is_mapped = True  # the engine has not freed its memory
        self.num_mappings = 0
        self._words = itertools.count(1)
        self.fence = FenceSlots(NUM_SLOTS)
        self.events: deque[Event] = deque()
        self.client = ClientSession(name, self.fence, -1, self.events.append)
        self.said: set[str] = set()  # what it does once only
        self.num_sleeps = 0
        self.released: set[int] = set()
        self.ended: dict[int, str] = {}  # by ticket: delivered, failed or in-doubt
        self.quiet: set[int] = set()
        self.noticed: set[int] = set()  # tickets of which a mover has told it itself
        # The connection.
        self.session: int | None = None  # the daemon's number for it
        self.retry_at = 0.0
        self.up: deque[Message] = deque()  # under way to the daemon
        self.down: deque[Any] = deque()  # and from it, with what comes along; None: its end
        self.watched: dict[int, set[int]] = {}  # movers that live, by the connection that told of them
        self.lost: set[int] = set()  # connections that are over, whose movers may live

    def new_page(self) -> Page:
        """A fence page, whoever makes it."""
        return Page(self._words)

    def join_as(self, spec: EngineSpec, layout: RankLayout | None) -> None:
        """Become a rank, or a publisher where there is no layout."""
        self.layout = layout
        member: SessionRole = PublisherRole(spec.engine_id, spec.generation)
        if layout is not None:
            member = RankRole(spec, layout, self.exports())
        self.client.register(member)

    def exports(self) -> MemoryExport:
        """Its memory in a new mapping."""
        assert self.layout is not None
        region = self.layout.regions[0]
        exports = MemoryExport((RegionExport(region.region, region.size_bytes, 0),), ())
        self.num_mappings += 1
        exports.incarnation = f"{self.name}.{self.num_mappings}"  # a replay must make the same one
        return exports

    def end(self, ticket: int, how: str) -> None:
        """A pull is over: delivered, failed or in-doubt."""
        assert ticket not in self.ended, f"ticket {ticket} ended twice"
        self.ended[ticket] = how

    def mover_died(self, mover: int) -> None:
        """Its pidfd, if this process has it, is readable."""
        for movers in self.watched.values():
            movers.discard(mover)
        self.judge()

    def judge(self) -> None:
        """Connections that are over and whose movers are all dead are quiet."""
        for epoch in sorted(self.lost):
            if not self.watched.get(epoch):
                self.watched.pop(epoch, None)
                self.lost.discard(epoch)
                self.client.movers_exited(epoch)
