"""Whether a process of this node gets a processor when it wakes up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvxferd.doctor.finding import CheckContext, Finding, ok, warn
from kvxferd.telemetry.late_timers import REMEDY, Cause, ClockReading, Lateness, lateness_of, read_clocks

# Forty wake-ups: a node that starves its daemons does so for seconds at a time.
MEASURE_S = 2.0
SLEEP_S = 0.05


class WakeUps(NamedTuple):
    """How late a process woke up from short sleeps."""

    num_sleeps: int
    latest_s: float
    late: Lateness | None  # the latest that was too late


def check(node: CheckContext) -> Iterator[Finding]:
    """Sleep for short times, and measure how late this process wakes up."""
    yield finding_of(measure_wake_ups(read_clocks, time.sleep), len(os.sched_getaffinity(0)))


def measure_wake_ups(read: Callable[[], ClockReading], sleep: Callable[[float], None]) -> WakeUps:
    """Sleep for `SLEEP_S` again and again, for `MEASURE_S` in all."""
    num_sleeps, latest_s = 0, 0.0
    late: Lateness | None = None
    before = read()
    end = before.now + MEASURE_S
    while before.now < end:
        sleep(SLEEP_S)
        after = read()
        num_sleeps += 1
        latest_s = max(latest_s, after.now - before.now - SLEEP_S)
        found = lateness_of(before, after, SLEEP_S)
        if found is not None and (late is None or found.late_s > late.late_s):
            late = found
        before = after
    return WakeUps(num_sleeps, latest_s, late)


def finding_of(measured: WakeUps, num_processors: int) -> Finding:
    """Return the row: a wake-up later than half a second is a warning."""
    facts = {
        "processors": num_processors,
        "sleeps": measured.num_sleeps,
        "latest_s": round(measured.latest_s, 6),
        "cause": measured.late.cause.value if measured.late else "",
    }
    processors = "one processor" if num_processors == 1 else f"{num_processors} processors"
    of = f"of {measured.num_sleeps} wake-ups, with {processors} to run on,"
    if measured.late is None:
        return ok("processors", f"the latest {of} was {1000 * measured.latest_s:.1f} ms late", **facts)
    found = f"the latest {of} was {measured.late.late_s:.1f} s late"
    if measured.late.cause is Cause.STARVED:
        return warn("processors", f"{found}: no processor was free", REMEDY, **facts)
    todo = "run this check again; if it repeats, look at the machine: a paused virtual machine, a slow disk"
    return warn("processors", f"{found}, and not for lack of a processor", todo, **facts)
