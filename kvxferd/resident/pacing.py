"""How a resident mover waits: it never spins, because whoever spins keeps the interpreter's lock."""

from __future__ import annotations

import time

from kvxferd.mover.pacing import ATTENDING_PAUSE_S, READING_PAUSE_S, RESTING_PAUSE_S, Pacer

# A thread that waits for the lock needs some 50 us to wake; a lock given up for less is taken back
# before it has, again and again, until the waiting thread forces its turn after 5 ms.
COURTESY_S = 100e-6
# A turn that took longer than this was in a copy of the library, or waited for the lock itself: others
# have had it.
LONG_S = 1e-3
# Of this thread's own time, between two pauses: a turn without work takes 30 us, one that serves a reader
# more. The clock on the wall would count how long others had the lock.
WORKED_S = 80e-6


class CourteousPacer(Pacer):
    """Sleeps between any two turns, so that the engine's threads find the lock free."""

    quick_s = 0.0

    def __init__(self) -> None:
        super().__init__(lambda: True)
        self._went_on_at = time.perf_counter()
        self._worked_s = time.thread_time()

    def worked(self, elapsed_s: float) -> None:
        """A turn that moved nothing here: was there something to do for a reader?"""
        if time.thread_time() - self._worked_s > WORKED_S:
            self.moved()

    def pause_s(self, is_reading: bool) -> float:
        """Return how long to wait now; 0 only where the lock has just been free for long."""
        now = time.perf_counter()
        turn_s, self._went_on_at = now - self._went_on_at, now
        self._worked_s = time.thread_time()
        idle = now - self._moved_at
        if turn_s > LONG_S and idle < LONG_S:
            return 0.0
        unread = ATTENDING_PAUSE_S if idle < 1.0 else RESTING_PAUSE_S
        pause_s = min(READING_PAUSE_S if is_reading else unread, max(COURTESY_S, idle / 8))
        self._went_on_at += pause_s
        return pause_s
