"""Counts the bytes of replies that peers have not read: libzmq limits messages, not bytes."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque

import zmq

# One reply can be 64 MiB of block ids in parts, or a manifest of 16 MiB. A reply without room is dropped: a
# slow reader sends its request again every two seconds, and gets it once it has read the earlier ones.
MAX_UNREAD_BYTES = 80 << 20
MAX_TOTAL_UNREAD_BYTES = 256 << 20
# Shorter ones are limited by libzmq's message count alone: 4,096 of them are 16 MiB.
MIN_TRACKED_BYTES = 4 << 10
MAX_SHORT_REPLIES = 4096
# Connections with a known peer: as many as the socket has at a time.
MAX_ROUTES = 16_384


class UnreadReplies:
    """Counts by peer the bytes that libzmq has not written to its connections yet."""

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
        """Record that a peer's message came on the route. False: the route belongs to another peer."""
        if self._peer_of.setdefault(route, peer) != peer:
            return False
        self._peer_of.move_to_end(route)
        if len(self._peer_of) > MAX_ROUTES:
            self._peer_of.popitem(last=False)
        return True

    def has_room(self, route: bytes, num_bytes: int = 0) -> bool:
        """Whether a reply of `num_bytes` may be sent. A longer one than the limit is sent alone."""
        if not self._num_total_bytes:  # the usual case
            return num_bytes <= self._max_total_bytes
        peer = self._peer(route)
        if not self._fits(peer, num_bytes):
            self._drop_written(peer)
        if not self._fits(peer, num_bytes):
            for other in list(self._sent):
                self._drop_written(other)
        return self._fits(peer, num_bytes)

    def add(self, route: bytes, tracker: zmq.MessageTracker, num_bytes: int) -> None:
        """Count a reply that was given to libzmq."""
        peer = self._peer(route)
        self._sent.setdefault(peer, deque()).append((tracker, num_bytes))
        self._num_bytes[peer] += num_bytes
        self._num_total_bytes += num_bytes
        self._drop_written(peer)

    @property
    def num_bytes(self) -> int:
        """The unwritten bytes at the last check."""
        return self._num_total_bytes

    def _peer(self, route: bytes) -> str:
        return self._peer_of.get(route) or route.hex()

    def _fits(self, peer: str, num_bytes: int) -> bool:
        if self._num_total_bytes + num_bytes > self._max_total_bytes:
            return False
        return not self._num_bytes[peer] or self._num_bytes[peer] + num_bytes <= self._max_bytes

    def _drop_written(self, peer: str) -> None:
        """Drop written replies, in order. Routes of one peer may finish out of order; those wait."""
        waiting = self._sent.get(peer)
        while waiting and waiting[0][0].done:
            _, num_bytes = waiting.popleft()
            self._num_bytes[peer] -= num_bytes
            self._num_total_bytes -= num_bytes
        if not waiting:
            self._sent.pop(peer, None)
            del self._num_bytes[peer]
