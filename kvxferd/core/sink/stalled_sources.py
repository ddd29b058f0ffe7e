"""Refuses source engines whose reads repeatedly do not end, and cost their readers movers, for a while.

One failure of a source ends the reads of many ranks within seconds of each other: it counts once.

Stalls are counted by reading user, and only that user is refused: a resident mover is part of a worker, and
one that never ends a read would otherwise make a good source refused to all users.
"""

from __future__ import annotations

from collections import deque

from kvxferd.core.context import NodeContext
from kvxferd.errors import Code, EngineError
from kvxferd.ids import Endpoint, EngineKey
from kvxferd.wire.common import TransferRef

# Each of these has retired movers, and with them their ranks' other pulls that did not end in time.
MAX_STALLS = 3
WINDOW_S = 60.0
REFUSED_S = 30.0
# An entry is 200 bytes, and the engines of 512 peers (limits.max_peers) with a start each minute are fewer.
MAX_SOURCES = 1024


class SourceBreaker:
    """Counts stalls by reading user and source engine; forgets them after `WINDOW_S`."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._stalled_at: dict[tuple[int, Endpoint, EngineKey], deque[float]] = {}  # the longest quiet first

    def __len__(self) -> int:
        return len(self._stalled_at)

    def record_stall(self, uid: int, ref: TransferRef) -> None:
        """Count a mover of that user that was retired because a read from the reference's engine hung."""
        source = (uid, ref.endpoint, ref.engine)
        at = self._stalled_at.pop(source, None) or deque(maxlen=MAX_STALLS)
        if not at or self._context.now - at[-1] >= self._context.settings.quiesce_s:
            at.append(self._context.now)
        self._stalled_at[source] = at
        oldest = self._context.now - WINDOW_S
        while self._stalled_at:
            source, at = next(iter(self._stalled_at.items()))
            if at[-1] > oldest and len(self._stalled_at) <= MAX_SOURCES:
                return
            del self._stalled_at[source]

    def check(self, uid: int, ref: TransferRef, what: str) -> None:
        """Raise EngineError(source-stalled) while the user may not read the reference's engine."""
        at = self._stalled_at.get((uid, ref.endpoint, ref.engine))
        if at is None or len(at) < MAX_STALLS or at[-1] - at[0] > WINDOW_S:
            return
        left_s = at[-1] + REFUSED_S - self._context.now
        if left_s <= 0:
            return
        raise EngineError(
            f"{what}: {MAX_STALLS} times within {WINDOW_S:g} s reads from engine {ref.engine} at "
            f"{ref.endpoint} did not end; look at that engine's node, and try again in {left_s:.0f} s",
            Code.SOURCE_STALLED,
            retry_after_s=left_s,
        )
