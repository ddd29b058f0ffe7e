"""Counts the bytes of replies that peers have not read: libzmq limits messages, not bytes."""

from __future__ import annotations

from collections import OrderedDict, deque

import zmq

from kvxferd.core.limits.ledger import FairShare

# A reply has at most 16 MiB. One without room is dropped: a slow reader sends its request again every two
# seconds, and gets it once it has read the earlier ones. Whoever has little unread has room for one.
MAX_UNREAD_BYTES = 256 << 20
# Shorter ones are limited by libzmq's message count alone: 4,096 of them are 16 MiB.
MIN_TRACKED_BYTES = 4 << 10
MAX_SHORT_REPLIES = 4096
# Connections with a known peer: as many as the socket has at a time.
MAX_ROUTES = 16_384


class UnreadReplies:
    """Counts by peer the bytes that libzmq has not written to its connections yet."""

    def __init__(self, max_bytes: int = MAX_UNREAD_BYTES) -> None:
        self._share = FairShare(max_bytes)
        self._peer_of: OrderedDict[bytes, str] = OrderedDict()
        self._sent: dict[str, deque[tuple[zmq.MessageTracker, int]]] = {}

    def claim_route(self, route: bytes, peer: str) -> bool:
        """Record that a peer's message came on the route. False: the route belongs to another peer."""
        if self._peer_of.setdefault(route, peer) != peer:
            return False
        self._peer_of.move_to_end(route)
        if len(self._peer_of) > MAX_ROUTES:
            self._peer_of.popitem(last=False)
        return True

    def has_room(self, route: bytes, num_bytes: int = 0) -> bool:
        """Whether a reply of `num_bytes` may be sent."""
        if not self._share.held:  # the usual case
            return True
        peer = self._peer(route)
        if not self._share.has_room(peer, num_bytes):
            self._drop_written(peer)
        if not self._share.has_room(peer, num_bytes):
            for other in list(self._sent):
                self._drop_written(other)
        return self._share.has_room(peer, num_bytes)

    def add(self, route: bytes, tracker: zmq.MessageTracker, num_bytes: int) -> None:
        """Count a reply that was given to libzmq."""
        peer = self._peer(route)
        self._sent.setdefault(peer, deque()).append((tracker, num_bytes))
        self._share.add(peer, num_bytes)
        self._drop_written(peer)

    def _peer(self, route: bytes) -> str:
        return self._peer_of.get(route) or route.hex()

    def _drop_written(self, peer: str) -> None:
        """Drop written replies, in order. Routes of one peer may finish out of order; those wait."""
        waiting = self._sent.get(peer)
        while waiting and waiting[0][0].done:
            self._share.release(peer, waiting.popleft()[1])
        if not waiting:
            self._sent.pop(peer, None)
