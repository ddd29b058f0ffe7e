"""Limits how often unprivileged HTTP clients may send requests."""

from __future__ import annotations

from collections.abc import Callable


class HttpRateLimiter:
    """Limits the request rate of each unprivileged source; faster requests wait.

    A cached response costs the loop 0.5 ms (aiohttp 3.14, 2 MB), the layouts of 64 ranks of Llama-3-70B as
    much: 20 a second are 1 % of it, and those of ten sources 10 %.
    """

    PER_S = 20.0
    BURST = 50.0
    MAX_WAITING = 64  # earlier requests that a source waits for: as many as it has connections
    MAX_SOURCES = 1_024

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tokens: dict[str, tuple[float, float]] = {}  # requests allowed at once, and since when

    def delay_s(self, source: str) -> float:
        """Count a request of the source; return for how long it is to wait."""
        now = self._clock()
        left, then = self._tokens.pop(source, (self.BURST, now))
        left = min(self.BURST, left + (now - then) * self.PER_S)
        if len(self._tokens) >= self.MAX_SOURCES:
            del self._tokens[next(iter(self._tokens))]  # its last request is the oldest
        left = max(left - 1, -self.MAX_WAITING)
        self._tokens[source] = left, now
        return max(0.0, -left / self.PER_S)
