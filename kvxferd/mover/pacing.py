"""How long a mover waits before it looks again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

HOT_S = 5e-6
SPIN_S = 40e-6
YIELD_S = 200e-6
MIN_PAUSE_S = 50e-6
READING_PAUSE_S = 500e-6  # the longest while a read is under way here
ATTENDING_PAUSE_S = 1e-3  # the longest while others may read from here
RESTING_PAUSE_S = 2e-3  # and when nobody has for a second
# A call into the library that has nothing to do takes 1 us, with cold caches after a sleep up to 30;
# one that serves a reader takes longer. There is no other sign of being read.
WORKED_S = 12e-6
WORKED_COLD_S = 40e-6


class Pacer:
    """Spins for tens of microseconds, yields, then sleeps in growing steps."""

    # The posts of a small pull, its fence word's included, follow one another. What takes longer is
    # a large one's, and the daemon's messages are looked at in between.
    quick_s = 300e-6

    def __init__(self, is_crowded: Callable[[], bool]) -> None:
        self._is_crowded = is_crowded
        self._moved_at = time.perf_counter()
        self._has_paused = False

    def worked(self, elapsed_s: float) -> None:
        """A call into the library took so long: was there something to do for it?"""
        if elapsed_s > (WORKED_COLD_S if self._has_paused else WORKED_S):
            self.moved()

    def moved(self) -> None:
        """Something happened: look again at once."""
        self._moved_at = time.perf_counter()

    def pause_s(self, is_reading: bool) -> float:
        """Return how long to wait now; 0 after it has given the core away where that is due."""
        idle = time.perf_counter() - self._moved_at
        self._has_paused = idle >= YIELD_S
        if idle < YIELD_S:
            # Right after something happened more is likely to be there: whoever gave the core away
            # then would have it back after somebody else's turn.
            if idle > SPIN_S or (idle > HOT_S and self._is_crowded()):
                os.sched_yield()
            return 0.0
        unread = ATTENDING_PAUSE_S if idle < 1.0 else RESTING_PAUSE_S
        return min(READING_PAUSE_S if is_reading else unread, max(MIN_PAUSE_S, idle / 8))
