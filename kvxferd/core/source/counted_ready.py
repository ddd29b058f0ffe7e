"""The `RankReady` requests that a home has counted: a repeated request does not count twice."""

from __future__ import annotations

from collections import Counter, deque

from kvxferd.core.context import NodeContext
from kvxferd.core.limits.checks import check_count, check_reserve
from kvxferd.core.tables import decrease
from kvxferd.ids import BootId

# Requests that are kept for four minutes, of all daemons and of one: 32 ranks that each write 30 transfers a
# second are 230,400. One takes about 300 bytes.
MAX_COUNTED, MAX_COUNTED_PER_PEER = 1 << 19, 1 << 18
FORGOTTEN_PER_TURN, NEXT_TURN_S = 4096, 0.001


class CountedReady:
    """Keeps requests for twice as long as a member repeats one."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._requests: set[tuple[BootId, int]] = set()
        self._num_of_peer: Counter[str] = Counter()  # by key, or boot
        # The oldest first. One timer serves all: with a timer for each, 50,000 made every full garbage
        # collection 50 ms longer.
        self._expiry: deque[tuple[float, tuple[BootId, int], str]] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def has(self, boot: BootId, request: int) -> bool:
        """Whether the request of the daemon with that boot has been counted."""
        return (boot, request) in self._requests

    def check_room(self, peer_id: str) -> None:
        """Raise BusyError where one more request of that daemon passes a limit."""
        what = "take one more rank as ready: too many were in the last minutes"
        check_count(len(self._requests), MAX_COUNTED, what, "not a setting")
        of_one = self._num_of_peer[peer_id]
        check_count(of_one, MAX_COUNTED_PER_PEER, what, "of one daemon; not a setting")
        check_reserve(of_one, len(self._requests), MAX_COUNTED, what, "what all may have")

    def add(self, boot: BootId, request: int, peer_id: str) -> None:
        """Keep a request. `peer_id` is the key of its sender, or without keys the sender's boot."""
        self._requests.add((boot, request))
        self._num_of_peer[peer_id] += 1
        expires_at = self._context.now + 2 * self._context.settings.acknowledge_for_s
        self._expiry.append((expires_at, (boot, request), peer_id))
        if len(self._expiry) == 1:
            self._forget_old()

    def _forget_old(self) -> None:
        """Remove expired requests, some in each turn."""
        for _ in range(FORGOTTEN_PER_TURN):
            if not self._expiry:
                return
            expires_at, request, peer_id = self._expiry[0]
            if expires_at > self._context.now:
                break
            self._expiry.popleft()
            self._requests.discard(request)
            decrease(self._num_of_peer, peer_id)
        else:
            self._context.after("counted-ready", NEXT_TURN_S, self._forget_old)
            return
        self._context.after("counted-ready", expires_at - self._context.now, self._forget_old)
