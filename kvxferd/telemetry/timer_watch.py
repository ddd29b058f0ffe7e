"""A timer of the event loop that notices when it is late itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from kvxferd.telemetry.late_timers import (
    Cause,
    ClockReading,
    Lateness,
    LateTimers,
    ThreadClocks,
    lateness_of,
    read_clocks,
)
from kvxferd.telemetry.warnings.kinds import WarningKind
from kvxferd.telemetry.warnings.warning_list import WarningCondition, finding_of

log = structlog.get_logger()

# A stall of LATE_S and this is noticed for certain, a shorter one if it begins late enough before a turn.
# With four turns a second an idle node took 0.17 % of a core.
INTERVAL_S = 0.5


class TimerWatch:
    """Sets its timer again each time it fires. `on_late` gets each late one, on the loop's thread."""

    def __init__(
        self,
        on_late: Callable[[Lateness], None],
        read: Callable[[], ClockReading] | None = None,
        interval_s: float = INTERVAL_S,
        on_lag: Callable[[float], None] = lambda lag_s: None,
    ) -> None:
        """`on_lag` gets by how much each timer was late, in seconds."""
        self._on_late = on_late
        self._on_lag = on_lag
        self._clocks: ThreadClocks | None = None
        self._read = read or read_clocks
        self._interval_s = interval_s
        self._late_timers = LateTimers()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Set the first timer. Only on the loop's thread."""
        if self._read is read_clocks:
            self._clocks = ThreadClocks()
            self._read = self._clocks.read
        self._set(self._read())

    def stop(self) -> None:
        """Set no more timers."""
        if self._timer is not None:
            self._timer.cancel()
        if self._clocks is not None:
            self._clocks.close()

    def findings(self) -> list[WarningCondition]:
        """Return what an operator should know of late timers of the last minutes, one for each cause."""
        by_cause = self._late_timers.warnings(self._read().now)
        return [finding_of(WarningKind.TIMERS_LATE, cause.value, text) for cause, text in by_cause.items()]

    def _set(self, before: ClockReading) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._fire, before)

    def _fire(self, before: ClockReading) -> None:
        after = self._read()
        self._on_lag(max(0.0, after.now - before.now - self._interval_s))
        lateness = lateness_of(before, after, self._interval_s)
        self._set(after)
        if lateness is None:
            return
        self._on_late(lateness)
        self._late_timers.add(lateness, after.now)
        cause, late_s = lateness.cause.value, round(lateness.late_s, 3)
        if lateness.cause is Cause.STOPPED:
            log.info("timers late", limit_by=cause, cause=cause, late_s=late_s)
        else:
            log.warning("timers late", limit_by=cause, cause=cause, late_s=late_s)
