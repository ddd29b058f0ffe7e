"""Whether a process's timers are late, and why: it had no processor, it computed, or it was stopped.

Pure: the caller reads the clocks (`read_clocks`) before and after a sleep. A busy node delays leases,
deadlines and replies without an error anywhere, so a daemon that is kept off the processors reports it.
"""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

# Replies, renewals and deadlines are counted in seconds: half of one is felt.
LATE_S = 0.5
# A warning ends after this long without a late timer.
CLEAR_AFTER_S = 300.0

REMEDY = (
    "hold the engines to fewer processors (taskset, cpusets, AllowedCPUs=), or raise the daemon's CPU limit: "
    "docs/how-to/processors.md"
)

# Nanoseconds on a processor, nanoseconds ready without one, number of turns; of the thread that reads it.
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class Cause(StrEnum):
    """Why a timer was late."""

    STARVED = "starved"  # the thread was ready, and the node gave it no processor
    BUSY = "busy"  # the process itself computed
    STOPPED = "stopped"  # neither: SIGSTOP, a freezer, a paused virtual machine, a disk


class ClockReading(NamedTuple):
    """The clocks at one moment, in seconds."""

    now: float  # CLOCK_MONOTONIC: it stands still while a machine is suspended
    cpu_s: float  # CPU time of all threads of the process
    waited_s: float | None  # how long this thread was ready without a processor; None: unknown


class Lateness(NamedTuple):
    """A timer that was late."""

    late_s: float
    cause: Cause


class ThreadClocks:
    """The clocks of the thread that makes it, for many readings: the file of the kernel's count stays open.

    A reading takes 1 us; of that file by its name, 9 us, and five times that where nothing is in the caches.
    """

    def __init__(self) -> None:
        self._fd = -1
        with suppress(OSError):
            self._fd = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> ClockReading:
        """Return the clocks now; `waited_s` is None after `close`, and where the kernel does not count."""
        waited_s = None
        if self._fd >= 0:
            with suppress(OSError):
                waited_s = waited_s_of(os.pread(self._fd, 256, 0))
        return ClockReading(time.monotonic(), time.process_time(), waited_s)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_clocks() -> ClockReading:
    """Return the clocks of the calling thread."""
    clocks = ThreadClocks()
    try:
        return clocks.read()
    finally:
        clocks.close()


def waited_s_of(schedstat: bytes) -> float | None:
    """Return a schedstat file's seconds without a processor; None where the kernel does not count."""
    try:
        ran_ns, waited_ns, num_turns = map(int, schedstat.split())
    except ValueError:
        return None
    # A kernel that does not count shows three zeros.
    return waited_ns / 1e9 if ran_ns or waited_ns or num_turns else None


def lateness_of(before: ClockReading, after: ClockReading, sleep_s: float) -> Lateness | None:
    """Return by how much a timer of `sleep_s` was late, and why; None if by no more than `LATE_S`.

    The cause is what the largest part of the lateness was spent in; more than `LATE_S` without a processor
    counts before a stop of any length. Of equal parts a stop counts first, which warns nobody, and computing
    last: nobody is sent to look for what the clocks do not show. Where the kernel does not count the time
    without a processor, a process that did not compute for more than half of it counts as starved.
    """
    late_s = after.now - before.now - sleep_s
    if late_s <= LATE_S:
        return None
    busy_s = min(late_s, after.cpu_s - before.cpu_s)
    if before.waited_s is None or after.waited_s is None:
        return Lateness(late_s, Cause.BUSY if 2 * busy_s > late_s else Cause.STARVED)
    waited_s = min(late_s, after.waited_s - before.waited_s)
    if waited_s > max(LATE_S, busy_s):
        return Lateness(late_s, Cause.STARVED)
    parts = {Cause.STOPPED: late_s - busy_s - waited_s, Cause.STARVED: waited_s, Cause.BUSY: busy_s}
    return Lateness(late_s, max(parts, key=lambda cause: parts[cause]))


@dataclass(slots=True)
class _LateOfCause:
    times: int = 0
    late_s: float = 0.0  # the latest of them
    last_at: float = -math.inf

    def is_over(self, now: float) -> bool:
        return now - self.last_at > CLEAR_AFTER_S


class LateTimers:
    """The late timers of the last minutes, by cause; each begins anew after `CLEAR_AFTER_S` without one."""

    def __init__(self) -> None:
        self._causes = {cause: _LateOfCause() for cause in Cause}

    def add(self, lateness: Lateness, now: float) -> None:
        """Record a late timer."""
        if self._causes[lateness.cause].is_over(now):
            self._causes[lateness.cause] = _LateOfCause()
        late = self._causes[lateness.cause]
        late.times += 1
        late.late_s = max(late.late_s, lateness.late_s)
        late.last_at = now

    def warnings(self, now: float) -> dict[Cause, str]:
        """Return a sentence for each cause that an operator can act on, with what to do."""
        found: dict[Cause, str] = {}
        for cause, late in self._causes.items():
            if cause is Cause.STOPPED or late.is_over(now):
                continue
            times = "once" if late.times == 1 else f"{late.times} times"
            how = f"by up to {late.late_s:.1f} s, {times}, last {now - late.last_at:.0f} s ago"
            if cause is Cause.STARVED:
                found[cause] = (
                    f"the node starves this daemon: it had no processor, and its timers were late {how}; "
                    f"{REMEDY}"
                )
            else:
                found[cause] = (
                    f"this daemon computed, and its timers were late {how}; report it with the daemon's log"
                )
        return found
