"""How many bytes of answers wait for peers to read them: libzmq counts messages, and keeps them all."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque

import zmq

# One answer can be 64 MiB of block ids in parts, or a manifest of 16 MiB. What does not fit beside is
# dropped: a slow reader asks again every two seconds, and has it once it has read what came before.
MAX_UNREAD_BYTES = 80 << 20
MAX_TOTAL_UNREAD_BYTES = 256 << 20
# Shorter ones are only counted by libzmq: 4,096 of them are 16 MiB.
MIN_TRACKED_BYTES = 4 << 10
MAX_SHORT_REPLIES = 4096
# Connections whose peer is known: as many as the socket has at a time.
MAX_ROUTES = 16_384


class UnreadReplies:
    """Counts what libzmq has not written to its connections yet, by peer."""

    def __init__(
        self, max_bytes: int = MAX_UNREAD_BYTES, max_total_bytes: int = MAX_TOTAL_UNREAD_BYTES
    ) -> None:
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes
        self._peer_of: OrderedDict[bytes, str] = OrderedDict()
        self._sent: dict[str, deque[tuple[zmq.MessageTracker, int]]] = {}
        self._num_bytes: Counter[str] = Counter()
        self._num_total_bytes = 0

    def claim_route(self, route: bytes, peer: str) -> bool:
        """A message of that peer came on the route. False: the route is another peer's."""
        if self._peer_of.setdefault(route, peer) != peer:
            return False
        self._peer_of.move_to_end(route)
        if len(self._peer_of) > MAX_ROUTES:
            self._peer_of.popitem(last=False)
        return True

    def has_room(self, route: bytes, num_bytes: int = 0) -> bool:
        """Whether an answer of so many bytes may be sent. One that is too long goes alone."""
        if not self._num_total_bytes:  # as nearly always
            return num_bytes <= self._max_total_bytes
        peer = self._peer(route)
        if not self._fits(peer, num_bytes):
            self._drop_written(peer)
        if not self._fits(peer, num_bytes):
            for other in list(self._sent):
                self._drop_written(other)
        return self._fits(peer, num_bytes)

    def add(self, route: bytes, tracker: zmq.MessageTracker, num_bytes: int) -> None:
        """An answer was handed to libzmq."""
        peer = self._peer(route)
        self._sent.setdefault(peer, deque()).append((tracker, num_bytes))
        self._num_bytes[peer] += num_bytes
        self._num_total_bytes += num_bytes
        self._drop_written(peer)

    @property
    def num_bytes(self) -> int:
        """What waited when it was looked at last."""
        return self._num_total_bytes

    def _peer(self, route: bytes) -> str:
        return self._peer_of.get(route) or route.hex()

    def _fits(self, peer: str, num_bytes: int) -> bool:
        if self._num_total_bytes + num_bytes > self._max_total_bytes:
            return False
        return not self._num_bytes[peer] or self._num_bytes[peer] + num_bytes <= self._max_bytes

    def _drop_written(self, peer: str) -> None:
        """Forget what has been written. Routes of one peer may be written out of order: rarely, and later."""
        waiting = self._sent.get(peer)
        while waiting and waiting[0][0].done:
            _, num_bytes = waiting.popleft()
            self._num_bytes[peer] -= num_bytes
            self._num_total_bytes -= num_bytes
        if not waiting:
            self._sent.pop(peer, None)
            del self._num_bytes[peer]
