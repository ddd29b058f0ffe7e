"""The messages that a session sends to its daemon, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from kvxferd.client.publishes import ClientPublish, ClientPublishes
from kvxferd.client.pulls import ClientPull, ClientPulls
from kvxferd.errors import BusyError
from kvxferd.layout import num_id_bytes
from kvxferd.wire import worker
from kvxferd.wire.block_id_parts import split_block_ids
from kvxferd.wire.common import Message
from kvxferd.wire.fd_batches import leading_fd_batches, start_of_last_batch

# 2 * MAX_LIVE_PULLS of client/pulls.py; a daemon this far behind does not read its socket.
MAX_QUEUED = 1 << 17


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message and the descriptors that go with it."""

    message: Message
    fds: tuple[int, ...] = ()


Request = worker.PullRequest | worker.Publish | worker.Ready  # those with block ids
# The message of a pull or publish is built when it is sent, with the deadline or lease that remains then;
# one that has ended meanwhile is skipped.
QueuedItem = Message | ClientPull | ClientPublish
_WITH_BLOCKS = (ClientPull, ClientPublish, worker.Ready)
# Items that the next daemon must receive; all other messages follow from the session's state.
_SENT_AFTER_RECONNECT = (worker.Prepare, worker.Abandon)


class Outbox:
    """Messages to send at once, then items to send while the session is READY."""

    def __init__(self, pulls: ClientPulls, publishes: ClientPublishes) -> None:
        self._pulls = pulls
        self._publishes = publishes
        self._first: deque[Outgoing] = deque()
        self._queue: deque[QueuedItem] = deque()
        self._stream = 0

    def queue_first(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Queue before everything else: the handshake. Descriptors beyond a frame's limit are sent ahead."""
        self._first.extend(Outgoing(ahead, part) for ahead, part in leading_fd_batches(fds))
        self._first.append(Outgoing(message, fds[start_of_last_batch(len(fds)) :]))

    def check_room(self, what: str) -> None:
        """Raise BusyError when the daemon is too far behind to queue more."""
        if len(self._queue) >= MAX_QUEUED:
            raise BusyError(f"cannot {what}: {MAX_QUEUED} messages wait for a daemon to take them", 1.0)

    def queue(self, item: QueuedItem) -> None:
        """Queue an item, which is sent while the session is READY, in the order queued."""
        self._queue.append(item)

    def pop_short(self, most_bytes: int, epoch: int, now: float) -> Message | None:
        """Return the message of the only item that waits, if it has at most `most_bytes` of block ids."""
        if self._first or len(self._queue) != 1:
            return None
        item = self._queue[0]
        if isinstance(item, _WITH_BLOCKS) and num_id_bytes(item.blocks) > most_bytes:
            return None
        self._queue.clear()
        return self._build_message(item, epoch, now)

    def replay(self, items: Sequence[QueuedItem]) -> None:
        """Queue these before the items that wait."""
        self._queue.extendleft(reversed(items))

    def connection_lost(self) -> None:
        """Drop what was for the connection that has ended; keep what the next daemon must receive."""
        self._first.clear()
        self._queue = deque(item for item in self._queue if isinstance(item, _SENT_AFTER_RECONNECT))

    def pop(self, ready: bool, epoch: int, now: float) -> Outgoing | None:
        """Return the next message to send, None when there is none now. `ready`: the session is READY."""
        while ready and not self._first and self._queue:
            message = self._build_message(self._queue.popleft(), epoch, now)
            if isinstance(message, Request):
                self._first.extend(self._split(message))
            elif message is not None:
                self._first.append(Outgoing(message))
        return self._first.popleft() if self._first else None

    def _build_message(self, item: QueuedItem, epoch: int, now: float) -> Message | None:
        """Return the item's message, None if it has ended."""
        match item:
            case ClientPull():
                return self._pulls.build_message(item, epoch, now)
            case ClientPublish():
                return self._publishes.build_message(item, epoch, now)
            case _:
                return item

    def _split(self, request: Request) -> Iterator[Outgoing]:
        self._stream += 1
        parts, rest = split_block_ids(request.blocks, self._stream)
        if parts:
            request = msgspec.structs.replace(request, blocks=rest, stream=self._stream)
        return map(Outgoing, [*parts, request])
