"""How long a mover waits before it looks again."""

from __future__ import annotations

import time
from collections.abc import Callable

HOT_S = 5e-6  # how long to spin where a core is wanted by more movers than there are cores
SPIN_S = 40e-6
MIN_PAUSE_S = 50e-6
READING_PAUSE_S = 500e-6  # the longest while a read is under way here
ATTENDING_PAUSE_S = 1e-3  # the longest while others may read from here
RESTING_PAUSE_S = 2e-3  # and when nobody has for a second
# A call into the library that has nothing to do takes 1 us, with cold caches after a sleep up to 30;
# one that serves a reader takes longer. There is no other sign of being read.
WORKED_S = 12e-6
WORKED_COLD_S = 40e-6


class Pacer:
    """Spins for tens of microseconds, then sleeps in growing steps.

    It does not yield: under Linux 6.18 whoever yields gives its turn up to everybody who wants the core,
    while whoever sleeps is given one when it wakes.
    """

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
        """Return how long to wait now; 0 for not at all."""
        idle = time.perf_counter() - self._moved_at
        self._has_paused = idle >= (HOT_S if self._is_crowded() else SPIN_S)
        if not self._has_paused:
            return 0.0
        unread = ATTENDING_PAUSE_S if idle < 1.0 else RESTING_PAUSE_S
        return min(READING_PAUSE_S if is_reading else unread, max(MIN_PAUSE_S, idle / 8))
