"""How a resident mover waits: it never spins, because a thread that spins keeps the interpreter's lock."""

from __future__ import annotations

import time

from kvxferd.mover.process.backoff import (
    MAX_IDLE_PAUSE_S,
    MAX_READING_PAUSE_S,
    MAX_SERVING_PAUSE_S,
    PollBackoff,
)

# A thread that waits for the lock needs some 50 us to wake. A lock that is released for less is taken again
# before that, again and again, until the waiting thread forces its turn after 5 ms.
MIN_YIELD_S = 100e-6
# A turn that took longer than this was in a copy of the library, or waited for the lock itself: other threads
# have had the lock.
LONG_TURN_S = 1e-3
# CPU time of this thread between two pauses: a turn without work takes 30 us, one that serves a reader more.
# A wall clock would count how long other threads had the lock.
BUSY_TURN_CPU_S = 80e-6


class YieldingBackoff(PollBackoff):
    """Sleeps between any two turns, so that the engine's threads find the lock free."""

    burst_s = 0.0

    def __init__(self) -> None:
        super().__init__(lambda: True)
        self._resumed_at = time.perf_counter()
        self._cpu_s = time.thread_time()

    def record_call(self, elapsed_s: float) -> None:
        """Reset the backoff where a turn took so much CPU time that it served a reader."""
        if time.thread_time() - self._cpu_s > BUSY_TURN_CPU_S:
            self.reset()

    def pause_s(self, is_reading: bool) -> float:
        """Return how long to wait now; 0 only where the lock was just free for a long time."""
        now = time.perf_counter()
        turn_s, self._resumed_at = now - self._resumed_at, now
        self._cpu_s = time.thread_time()
        idle = now - self._progress_at
        if turn_s > LONG_TURN_S and idle < LONG_TURN_S:
            return 0.0
        unread = MAX_SERVING_PAUSE_S if idle < 1.0 else MAX_IDLE_PAUSE_S
        pause_s = min(MAX_READING_PAUSE_S if is_reading else unread, max(MIN_YIELD_S, idle / 8))
        self._resumed_at += pause_s
        return pause_s
