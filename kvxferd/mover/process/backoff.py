"""How long a mover waits before it looks again."""

from __future__ import annotations

import time
from collections.abc import Callable

SPIN_OVERSUBSCRIBED_S = 5e-6  # how long to spin where a core is wanted by more movers than there are cores
SPIN_S = 40e-6
MIN_PAUSE_S = 50e-6
MAX_READING_PAUSE_S = 500e-6  # the longest while a read is under way here
MAX_SERVING_PAUSE_S = 1e-3  # the longest while others may read from here
MAX_IDLE_PAUSE_S = 2e-3  # and when nobody has for a second
# A call into the library that has nothing to do takes 1 us, with cold caches after a sleep up to 30;
# one that serves a reader takes longer. There is no other sign of being read.
BUSY_CALL_S = 12e-6
BUSY_COLD_CALL_S = 40e-6


class PollBackoff:
    """Spins for tens of microseconds, then sleeps in growing steps.

    It does not yield: under Linux 6.18 whoever yields gives its turn up to everybody who wants the core,
    while whoever sleeps is given one when it wakes.
    """

    # The posts of a small pull, its fence word's included, follow one another. What takes longer is
    # a large one's, and the daemon's messages are looked at in between.
    burst_s = 300e-6

    def __init__(self, is_oversubscribed: Callable[[], bool]) -> None:
        self._is_oversubscribed = is_oversubscribed
        self._progress_at = time.perf_counter()
        self._has_paused = False

    def record_call(self, elapsed_s: float) -> None:
        """A call into the library took so long: was there something to do for it?"""
        if elapsed_s > (BUSY_COLD_CALL_S if self._has_paused else BUSY_CALL_S):
            self.reset()

    def reset(self) -> None:
        """Something happened: look again at once."""
        self._progress_at = time.perf_counter()

    def pause_s(self, is_reading: bool) -> float:
        """Return how long to wait now; 0 for not at all."""
        idle = time.perf_counter() - self._progress_at
        self._has_paused = idle >= (SPIN_OVERSUBSCRIBED_S if self._is_oversubscribed() else SPIN_S)
        if not self._has_paused:
            return 0.0
        unread = MAX_SERVING_PAUSE_S if idle < 1.0 else MAX_IDLE_PAUSE_S
        return min(MAX_READING_PAUSE_S if is_reading else unread, max(MIN_PAUSE_S, idle / 8))
