"""What a session has to say to its daemon, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from kvxferd.client.publishes import Publishes
from kvxferd.client.pulls import Pulls
from kvxferd.errors import BusyError
from kvxferd.ids import Ticket, TransferId
from kvxferd.wire import worker
from kvxferd.wire.common import Message
from kvxferd.wire.descriptors import first_of_last, parts_ahead
from kvxferd.wire.ids_stream import split_ids

# Twice the pulls that may be live; a daemon this far behind does not read its socket.
MAX_QUEUED = 1 << 17


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message and the descriptors that go with it."""

    message: Message
    fds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SendPull:
    """A pull to be sent when its turn comes, if it has not ended by then."""

    number: Ticket


@dataclass(frozen=True, slots=True)
class SendPublish:
    """A publish to be sent when its turn comes, if it is not released by then."""

    transfer_id: TransferId


Item = Message | SendPull | SendPublish
# What a new daemon must hear though an old one was asked; all else follows from the session's state.
_SURVIVES = (SendPull, worker.Prepare, worker.Abandon)


class Outbox:
    """Messages that go now, then items that go once the daemon takes requests."""

    def __init__(self, pulls: Pulls, publishes: Publishes) -> None:
        self._pulls = pulls
        self._publishes = publishes
        self._now: deque[Outgoing] = deque()
        self._queue: deque[Item] = deque()
        self._stream = 0

    def say(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send before everything queued: the handshake. More descriptors than a frame carries go ahead."""
        self._now.extend(Outgoing(ahead, part) for ahead, part in parts_ahead(fds))
        self._now.append(Outgoing(message, fds[first_of_last(len(fds)) :]))

    def check_room(self, what: str) -> None:
        """Raise BusyError when the daemon is too far behind to queue more."""
        if len(self._queue) >= MAX_QUEUED:
            raise BusyError(f"cannot {what}: {MAX_QUEUED} messages wait for a daemon to take them", 1.0)

    def queue(self, item: Item) -> None:
        """Send when the daemon takes requests, in the order queued."""
        self._queue.append(item)

    def is_short(self, most_bytes: int) -> bool:
        """Whether one item waits, and no more than so many bytes of block ids with it."""
        if self._now or len(self._queue) != 1:
            return False
        match self._queue[0]:
            case SendPull(number):
                return self._pulls.num_id_bytes(number) <= most_bytes
            case SendPublish(transfer_id):
                return self._publishes.num_id_bytes(transfer_id) <= most_bytes
            case _:
                return True

    def replay(self, items: Sequence[Item]) -> None:
        """Send these before what is queued."""
        self._queue.extendleft(reversed(items))

    def lose(self) -> None:
        """The connection has ended: keep what the next one must hear."""
        self._now.clear()
        self._queue = deque(item for item in self._queue if isinstance(item, _SURVIVES))

    def clear(self) -> None:
        """Nobody will hear any of it."""
        self._now.clear()
        self._queue.clear()

    def next(self, ready: bool, epoch: int, version: int, now: float) -> Outgoing | None:
        """Return the next message to send, None when there is none now."""
        while ready and not self._now and self._queue:
            self._now.extend(self._expand(self._queue.popleft(), epoch, version, now))
        return self._now.popleft() if self._now else None

    def _expand(self, item: Item, epoch: int, version: int, now: float) -> Iterable[Outgoing]:
        match item:
            case SendPull(number):
                request: worker.Pull | worker.Publish | None = self._pulls.send(number, epoch, now)
            case SendPublish(transfer_id):
                request = self._publishes.send(transfer_id, now, version)
            case _:
                return [Outgoing(item)]
        return [] if request is None else self._in_parts(request)

    def _in_parts(self, request: worker.Pull | worker.Publish) -> list[Outgoing]:
        self._stream += 1
        parts, rest = split_ids(request.blocks, self._stream)
        if parts:
            request = msgspec.structs.replace(request, blocks=rest, stream=self._stream)
        return [*map(Outgoing, parts), Outgoing(request)]
