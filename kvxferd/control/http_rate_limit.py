"""Limits how often unprivileged HTTP clients may send requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class HttpRateLimiter:
    """Limits the request rate of each unprivileged source; faster requests wait.

    A cached response costs the loop 0.5 ms (aiohttp 3.14, 2 MB), the layouts of 64 ranks of Llama-3-70B as
    much: 20 a second are 1 % of it, and those of ten sources 10 %. The number of connections bounds the
    waiting requests; the request of a client that disconnects while it waits does not count.
    """

    PER_S = 20.0
    BURST = 50.0
    POLL_S = 0.02
    MAX_SOURCES = 1_024

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tokens: dict[str, tuple[float, float]] = {}  # requests allowed at once, and since when

    def try_acquire(self, source: str) -> bool:
        """Return whether the source may send a request now; True counts as one."""
        now = self._clock()
        left, then = self._tokens.pop(source, (self.BURST, now))
        left = min(self.BURST, left + (now - then) * self.PER_S)
        if len(self._tokens) >= self.MAX_SOURCES:
            del self._tokens[next(iter(self._tokens))]  # its last request is the oldest
        self._tokens[source] = (left - 1 if left >= 1 else left, now)
        return left >= 1

    async def acquire(self, source: str, is_gone: Callable[[], bool]) -> bool:
        """Wait until the source may send a request. False: the client has disconnected."""
        while not self.try_acquire(source):
            await asyncio.sleep(self.POLL_S)
            if is_gone():
                return False
        return True
