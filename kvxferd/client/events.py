"""The events that a session emits to its engine, and the queue in which they wait for `poll`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvxferd.errors import Code
from kvxferd.ids import Ticket, TransferId
from kvxferd.layout import BlockList
from kvxferd.wire.worker import PublishRefused, Released, Suspended


class PullTicket:
    """One pull. Every event of the pull carries this same object.

    Attributes:
        number: the session's number of the pull, from 1 on; log lines name it.
        transfer_id: the transfer that the pull reads.
        delivered: for an engine that polls its requests. True: the blocks hold the bytes. False: the
            pull has failed, and nothing writes the blocks. None: it runs, or has failed and its blocks may
            still be written; it stays None where the session is closed first. Call `poll` meanwhile.
    """

    __slots__ = ("_cancel", "delivered", "number", "transfer_id")

    def __init__(self, number: Ticket, transfer_id: TransferId, cancel: Callable[[Ticket], None]) -> None:
        self.number = number
        self.transfer_id = transfer_id
        self.delivered: bool | None = None
        self._cancel = cancel

    def cancel(self) -> None:
        """Request the end of the pull. Its one terminal event still comes: Delivered, if that was quicker."""
        self._cancel(self.number)

    def __repr__(self) -> str:
        return f"<PullTicket {self.number} of {self.transfer_id}>"


@dataclass(frozen=True, slots=True)
class Delivered:
    """The pull's blocks hold exactly the published bytes. Terminal.

    Attributes:
        ticket: the pull, as `pull` returned it.
        bytes: the bytes that were read into this rank's blocks.
        runs: the contiguous reads that they took.
        wire_s: seconds from the first read posted to the last one complete; of a progressive pull, those of
            its pieces together.
    """

    ticket: PullTicket
    bytes: int
    runs: int
    wire_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The pull ended without its bytes. Terminal.

    Attributes:
        ticket: the pull, as `pull` returned it.
        code: why, for machines.
        message: why, for people.
        blocks: those given to `pull`, as they were then.
        safe_to_reuse: False: a transport may still write the blocks; keep them out of use until
            `Quiesced` with the same ticket.
        retry_after_s: with the codes `busy` and `source-stalled`, the seconds after which pulling again may
            help; else 0, also where the session has ended: its client connects again by itself.
    """

    ticket: PullTicket
    code: Code
    message: str
    blocks: Mapping[str, BlockList]
    safe_to_reuse: bool
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Quiesced:
    """Nothing writes these blocks of a failed pull any more. At most once, after an unsafe Failed.

    Attributes:
        ticket: the pull that failed.
        blocks: those given to `pull`; the engine may use them again.
    """

    ticket: PullTicket
    blocks: Mapping[str, BlockList]


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The session has ended; every later call raises KvxferdError with this code.

    A daemon that merely goes away does not cause it: the client reconnects to the next one by itself. While
    movers of the session run, the ends of pulls and `Suspended` may come behind it.
    """

    code: Code
    message: str


Event = Delivered | Failed | Quiesced | Released | PublishRefused | Suspended | Disconnected
Emit = Callable[[Event], None]


class EventQueue:
    """Events that wait for the engine, and an eventfd that is readable while there are any.

    Thread-safe. No event is dropped: a session emits few events for each request.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False

    def fileno(self) -> int:
        """Return the descriptor that is readable while there are events; -1 after `close`."""
        return -1 if self._closed else self._fd

    def put(self, event: Event) -> None:
        """Add an event."""
        with self._lock:
            self._events.append(event)
            if len(self._events) == 1 and not self._closed:
                os.eventfd_write(self._fd, 1)

    def drain(self) -> list[Event]:
        """Return and remove all events, oldest first."""
        with self._lock:
            events, self._events = self._events, []
            if events and not self._closed:
                os.eventfd_read(self._fd)
        return events

    def close(self) -> None:
        """Close the descriptor; `drain` still returns the events that are left."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._fd)
