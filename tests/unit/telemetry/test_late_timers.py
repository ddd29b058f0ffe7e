"""Late timers: what counts as late, why it was, and how long an operator is told."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from kvxferd.telemetry.late_timers import (
    CLEAR_AFTER_S,
    IDLE_INTERVAL_S,
    Cause,
    ClockReading,
    TimerWatch,
    lateness_of,
)
from kvxferd.telemetry.metrics import Metrics
from kvxferd.telemetry.warnings import WarningKind
from tests.support.node_samples import node_snapshot

SLEEP_S = 0.25
START = ClockReading(100.0, 7.0, 3.0)


@pytest.mark.parametrize(
    ("elapsed_s", "cpu_s", "waited_s", "cause"),
    [
        (0.25, 0.0, 0.0, None),  # on time
        (0.75, 0.0, 0.5, None),  # late by just the limit
        (9.25, 0.001, 8.99, Cause.STARVED),  # spinning engines hold every processor
        (1.25, 0.3, 0.6, Cause.STARVED),  # it computed too, but mostly waited for a processor
        (1.25, 0.9, 0.1, Cause.BUSY),  # a long step of its own
        (1.25, 4.0, 0.0, Cause.BUSY),  # four threads of its own hold the interpreter
        (60.25, 0.0, 0.001, Cause.STOPPED),  # SIGSTOP, a freezer: it was not ready
        (60.25, 0.0, 0.7, Cause.STARVED),  # continued, and then starved
        (1.05, 0.001, 0.37, Cause.STOPPED),  # some of it without a processor, and less than is late
        (5.25, 0.002, 0.01, Cause.STOPPED),  # a system call that waits for a disk
        (1.25, 0.5, 0.0, Cause.STOPPED),  # as long busy as stopped: nothing is reported
        (0.99, 0.37, 0.37, Cause.STARVED),  # as long busy as without a processor
        (9.25, 0.0, None, Cause.STARVED),  # a kernel that does not count: not busy is starved
        (1.25, 0.8, None, Cause.BUSY),
        (1.25, 0.5, None, Cause.STARVED),
    ],
)
def test_a_late_timer_and_its_cause(
    elapsed_s: float, cpu_s: float, waited_s: float | None, cause: Cause | None
) -> None:
    waited_until_s = None if waited_s is None else 3.0 + waited_s
    after = ClockReading(START.now + elapsed_s, START.cpu_s + cpu_s, waited_until_s)
    late = lateness_of(START, after, SLEEP_S)
    assert (None if late is None else late.cause) == cause
    if late is not None:
        assert late.late_s == pytest.approx(elapsed_s - SLEEP_S)


def test_the_watch_warns_logs_and_counts() -> None:
    """A real event loop, and clocks that are passed in."""
    times = iter([ClockReading(0.0, 0.0, 0.0)])
    lags, idle = list[float](), list[bool]()

    async def run() -> None:
        nonlocal times
        done = asyncio.Event()

        def on_tick(lag_s: float) -> None:
            lags.append(lag_s)
            if len(lags) == 3:
                watch.stop()
                done.set()

        metrics = Metrics()
        watch = TimerWatch(
            on_tick, metrics.record_late_timer, lambda: bool(idle), lambda: next(times), interval_s=0.0
        )
        watch.start()
        starved, stopped = ClockReading(9.0, 0.0, 8.9), ClockReading(69.0, 0.0, 8.9)
        times = iter([starved, stopped, ClockReading(70.0, 0.9, 8.9), ClockReading(80.0, 0.9, 8.9)])
        await asyncio.wait_for(done.wait(), 30)
        found = {finding.subject: finding for finding in watch.warnings()}
        assert found.keys() == {"starved", "busy"}, "a stop is no warning"
        assert found["starved"].kind is WarningKind.TIMERS_LATE
        assert "it had no processor, and a timer was 9.0 s late, 71 s ago" in found["starved"].message
        assert "AllowedCPUs=" in found["starved"].remedy
        assert "computed" in found["busy"].message
        times = iter([ClockReading(9.1 + CLEAR_AFTER_S, 0.9, 8.9)])
        assert [finding.subject for finding in watch.warnings()] == ["busy"]
        # An idle process has fewer turns.
        idle.append(True)
        times = iter([ClockReading(500.0, 0.9, 8.9)])
        watch.start()
        assert watch._timer is not None
        assert watch._timer.when() - asyncio.get_running_loop().time() > IDLE_INTERVAL_S - 1
        watch.stop()
        text = metrics.render(node_snapshot()).decode()
        assert 'kvxferd_late_timers_total{cause="starved"} 1.0' in text
        assert 'kvxferd_late_timer_seconds_total{cause="starved"} 9.0' in text

    with structlog.testing.capture_logs() as lines:
        asyncio.run(run())
    assert lags == [9.0, 60.0, 1.0]
    assert [(line["log_level"], line["event"], line["cause"]) for line in lines] == [
        ("warning", "timers late", "starved"),
        ("info", "timers late", "stopped"),
        ("warning", "timers late", "busy"),
    ]
