"""Waits for the events of a rank, as an engine does: on its descriptor."""

from __future__ import annotations

import time
from collections import deque

from kvxferd import client
from kvxferd.errors import Code, KvxferdError
from kvxferd.fd_wait import wait_readable


class EventWaiter:
    """The events of one rank, in order."""

    def __init__(self, rank: client.RankHandle) -> None:
        self._rank = rank
        self._pending: deque[client.Event] = deque()

    def next_event(self, deadline: float) -> client.Event:
        """Return the next event. Raises KvxferdError if none comes until `deadline`, or on a disconnect.

        `deadline` is of time.monotonic(), which on Linux is also the clock of time.perf_counter().
        """
        while not self._pending:
            left = deadline - time.monotonic()
            wait_readable([self._rank.fileno()], left)
            self._pending.extend(self._rank.poll())
            if not self._pending and left <= 0:
                raise KvxferdError(
                    "cannot go on: the expected event of the daemon did not come in time", Code.DEADLINE
                )
        event = self._pending.popleft()
        if isinstance(event, client.Disconnected):
            raise KvxferdError(event.message, event.code)
        return event
