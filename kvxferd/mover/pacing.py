"""How long a mover waits before it looks again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

SPIN_S = 40e-6
YIELD_S = 200e-6
MIN_PAUSE_S = 50e-6
MAX_PAUSE_S = 500e-6
# A call into the library that has nothing to do takes 1-3 us; one that copies a packet takes longer.
WORKED_S = 12e-6


class Pacer:
    """Spins for tens of microseconds, yields, then sleeps in growing steps."""

    def __init__(self, is_crowded: Callable[[], bool]) -> None:
        self._is_crowded = is_crowded
        self._moved_at = time.perf_counter()

    def moved(self) -> None:
        """Something happened: look again at once."""
        self._moved_at = time.perf_counter()

    def pause_s(self) -> float:
        """Return how long to wait now; 0 after it has given the core away where that is due."""
        idle = time.perf_counter() - self._moved_at
        if idle < YIELD_S:
            if idle > SPIN_S or self._is_crowded():
                os.sched_yield()
            return 0.0
        return min(MAX_PAUSE_S, max(MIN_PAUSE_S, idle / 8))
