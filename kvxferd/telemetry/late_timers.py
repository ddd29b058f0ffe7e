"""Whether the timers of the event loop are late, and why: no processor, its own computing, or a stop.

A busy node delays leases, deadlines and replies without an error anywhere, so a daemon that is kept off the
processors reports it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import structlog

from kvxferd.telemetry.warnings import NodeWarning, WarningKind, warning_of

log = structlog.get_logger()

# Replies, renewals and deadlines are counted in seconds: half of one is felt.
LATE_S = 0.5
# A stall of this length and LATE_S is noticed for certain, a shorter one if it begins late enough before the
# timer's turn.
INTERVAL_S = 0.5
# While nothing happens: each turn of an idle process takes 0.3 ms, as nothing of it is in the caches.
IDLE_INTERVAL_S = 5.0
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


# Of a cause that an operator can act on: what was so for how long, and what to do.
_SENTENCES = {
    Cause.STARVED: "the node starves this daemon: it had no processor, and a timer was {how}; " + REMEDY,
    Cause.BUSY: "this daemon computed, and a timer was {how}; report it with the daemon's log",
}


class ClockReading(NamedTuple):
    """The clocks of a thread at one moment, in seconds."""

    now: float  # CLOCK_MONOTONIC: it stands still while a machine is suspended
    cpu_s: float  # CPU time of all threads of the process
    waited_s: float | None  # how long this thread was ready without a processor; None: unknown


class Lateness(NamedTuple):
    """A timer that was late."""

    late_s: float
    cause: Cause


def read_clocks() -> ClockReading:
    """Return the clocks of the calling thread."""
    try:
        waited_s = waited_s_of(_SCHEDSTAT.read_bytes())
    except OSError:
        waited_s = None
    return ClockReading(time.monotonic(), time.process_time(), waited_s)


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


class TimerWatch:
    """A timer of the event loop that notices when it is late itself.

    `on_tick` gets by how much each turn was late, in seconds; `on_late` those that count. `is_idle`: whether
    nothing has happened since the last turn, so that the next may come later.
    """

    def __init__(
        self,
        on_tick: Callable[[float], None],
        on_late: Callable[[Lateness], None],
        is_idle: Callable[[], bool] = lambda: False,
        read: Callable[[], ClockReading] = read_clocks,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._on_tick = on_tick
        self._on_late = on_late
        self._is_idle = is_idle
        self._read = read
        self._interval_s = interval_s
        self._last: dict[Cause, tuple[float, float]] = {}  # by how much the last was late, and when it was
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Set the first timer. Only on the loop's thread."""
        self._set(self._read())

    def stop(self) -> None:
        """Set no more timers."""
        if self._timer is not None:
            self._timer.cancel()

    def warnings(self) -> list[NodeWarning]:
        """Return what an operator should know of late timers of the last minutes, one for each cause."""
        if not self._last:
            return []
        now = self._read().now
        found = []
        for cause, (late_s, at) in self._last.items():
            if cause in _SENTENCES and now - at <= CLEAR_AFTER_S:
                text = _SENTENCES[cause].format(how=f"{late_s:.1f} s late, {now - at:.0f} s ago")
                found.append(warning_of(WarningKind.TIMERS_LATE, cause.value, text))
        return found

    def _set(self, before: ClockReading) -> None:
        interval_s = IDLE_INTERVAL_S if self._is_idle() else self._interval_s
        self._timer = asyncio.get_running_loop().call_later(interval_s, self._fire, before, interval_s)

    def _fire(self, before: ClockReading, interval_s: float) -> None:
        after = self._read()
        lateness = lateness_of(before, after, interval_s)
        self._set(after)
        if lateness is not None:
            self._report(lateness, after.now)
        self._on_tick(max(0.0, after.now - before.now - interval_s))

    def _report(self, lateness: Lateness, now: float) -> None:
        self._last[lateness.cause] = lateness.late_s, now
        self._on_late(lateness)
        cause, late_s = lateness.cause.value, round(lateness.late_s, 3)
        if lateness.cause is Cause.STOPPED:
            log.info("timers late", limit_by=cause, cause=cause, late_s=late_s)
        else:
            log.warning("timers late", limit_by=cause, cause=cause, late_s=late_s)
