"""How long a mover waits before it polls again."""

from __future__ import annotations

import time
from collections.abc import Callable

SPIN_OVERSUBSCRIBED_S = 5e-6  # how long to spin where there are more movers than cores
SPIN_S = 40e-6  # and where there are not
MIN_PAUSE_S = 50e-6
MAX_READING_PAUSE_S = 500e-6  # while a read of this mover is in flight
MAX_SERVING_PAUSE_S = 1e-3  # while peers may read from here
MAX_IDLE_PAUSE_S = 2e-3  # and where no peer has for a second
# A call into the library that has nothing to do takes 1 us, with cold caches after a sleep up to 30;
# one that serves a reader takes longer. There is no other sign of being read.
BUSY_CALL_S = 12e-6
BUSY_COLD_CALL_S = 40e-6
# The rest is of resident movers.
# A thread that waits for the lock needs some 50 us to wake. A lock that is released for less is taken again
# before that, again and again, until the waiting thread forces its turn after 5 ms.
MIN_YIELD_S = 100e-6
# A turn that took longer than this was in a copy of the library, or waited for the lock itself: other threads
# have had the lock.
LONG_TURN_S = 1e-3
# CPU time of this thread between two pauses: a turn without work takes 30 us, one that serves a reader more.
# A wall clock would count how long other threads had the lock.
BUSY_TURN_CPU_S = 80e-6


class PollBackoff:
    """Spins for tens of microseconds, then sleeps in growing steps.

    It does not yield: under Linux 6.18 a thread that yields waits for all others that want the core, while a
    thread that sleeps gets its turn when it wakes.
    """

    # The posts of a small pull, its fence word's included, follow one another without a look at the daemon's
    # messages. A large pull's take longer, and messages are handled in between.
    burst_s = 300e-6

    def __init__(self, is_oversubscribed: Callable[[], bool]) -> None:
        self._is_oversubscribed = is_oversubscribed
        self._progress_at = time.perf_counter()
        self._has_paused = False

    def record_call(self, elapsed_s: float) -> None:
        """Reset the backoff where a call into the library took so long that it had something to do."""
        if elapsed_s > (BUSY_COLD_CALL_S if self._has_paused else BUSY_CALL_S):
            self.reset()

    def reset(self) -> None:
        """Poll again at once, because something happened."""
        self._progress_at = time.perf_counter()

    def pause_s(self, is_reading: bool) -> float:
        """Return how long to wait now; 0 for not at all."""
        idle = time.perf_counter() - self._progress_at
        self._has_paused = idle >= (SPIN_OVERSUBSCRIBED_S if self._is_oversubscribed() else SPIN_S)
        if not self._has_paused:
            return 0.0
        unread = MAX_SERVING_PAUSE_S if idle < 1.0 else MAX_IDLE_PAUSE_S
        return min(MAX_READING_PAUSE_S if is_reading else unread, max(MIN_PAUSE_S, idle / 8))


class YieldingBackoff(PollBackoff):
    """Sleeps between any two turns of a resident mover, so that the engine's threads find the lock free.

    It never spins, because a thread that spins keeps the interpreter's lock.
    """

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
