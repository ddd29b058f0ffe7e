"""Which `rank-ready` requests of members a home has counted, so that a repeated one does not count twice."""

from __future__ import annotations

from collections import Counter, deque

from kvxferd.core.context import NodeContext
from kvxferd.core.limits import check_count, check_reserve
from kvxferd.ids import BootId

# Requests that are remembered for four minutes, all together and those of one daemon: 32 ranks of which each
# writes 30 transfers a second are 230,400. One takes about 300 bytes.
MAX_COUNTED, MAX_COUNTED_PER_PEER = 1 << 19, 1 << 18
FORGOTTEN_PER_TURN, NEXT_TURN_S = 4096, 0.001


class CountedReady:
    """Remembers requests for twice as long as a member repeats one."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._requests: set[tuple[BootId, int]] = set()
        self._num_of_peer: Counter[str] = Counter()  # by key, or boot
        # The oldest first. One timer for all: with one each, 50,000 had every full collection of garbage take
        # 50 ms more.
        self._expiry: deque[tuple[float, tuple[BootId, int], str]] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def has(self, boot: BootId, request: int) -> bool:
        """Whether that daemon's request has been counted."""
        return (boot, request) in self._requests

    def check_room(self, peer_id: str) -> None:
        """Raise BusyError where one more of that daemon's would be one too many."""
        what = "take one more rank as ready: too many were in the last minutes"
        check_count(len(self._requests), MAX_COUNTED, what, "not a setting")
        of_one = self._num_of_peer[peer_id]
        check_count(of_one, MAX_COUNTED_PER_PEER, what, "of one daemon; not a setting")
        check_reserve(of_one, len(self._requests), MAX_COUNTED, what, "what all may have")

    def add(self, boot: BootId, request: int, peer_id: str) -> None:
        """Remember a request; `asker` is the key that sent it, or without keys the boot."""
        self._requests.add((boot, request))
        self._num_of_peer[peer_id] += 1
        expires_at = self._context.now + 2 * self._context.settings.acknowledge_for_s
        self._expiry.append((expires_at, (boot, request), peer_id))
        if len(self._expiry) == 1:
            self._forget_old()

    def _forget_old(self) -> None:
        """Forget those that are old, some at a time."""
        for _ in range(FORGOTTEN_PER_TURN):
            if not self._expiry:
                return
            expires_at, request, asker = self._expiry[0]
            if expires_at > self._context.now:
                break
            self._expiry.popleft()
            self._requests.discard(request)
            self._num_of_peer[asker] -= 1
            if not self._num_of_peer[asker]:
                del self._num_of_peer[asker]
        else:
            self._context.after("counted-ready", NEXT_TURN_S, self._forget_old)
            return
        self._context.after("counted-ready", expires_at - self._context.now, self._forget_old)
