"""Late timers: what counts as late, why it was, and how long an operator is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
import structlog

from kvxferd.telemetry.late_timers import (
    CLEAR_AFTER_S,
    Cause,
    ClockReading,
    Lateness,
    LateTimers,
    ThreadClocks,
    lateness_of,
    read_clocks,
)
from kvxferd.telemetry.metrics import Metrics
from kvxferd.telemetry.timer_watch import TimerWatch
from kvxferd.telemetry.warnings.kinds import WarningKind
from kvxferd.telemetry.warnings.warning_list import WarningCondition
from tests.support.node_samples import node_snapshot

SLEEP_S = 0.25
START = ClockReading(100.0, 7.0, 3.0)


def after(elapsed_s: float, cpu_s: float, waited_s: float | None) -> ClockReading:
    """Return the clocks so much later than `START`."""
    assert START.waited_s is not None
    return ClockReading(
        START.now + elapsed_s, START.cpu_s + cpu_s, None if waited_s is None else START.waited_s + waited_s
    )


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
    late = lateness_of(START, after(elapsed_s, cpu_s, waited_s), SLEEP_S)
    assert (None if late is None else late.cause) == cause
    if late is not None:
        assert late.late_s == pytest.approx(elapsed_s - SLEEP_S)


def test_the_clocks_of_a_thread_are_those_of_one_reading() -> None:
    """With the file of the kernel's count kept open, it goes on; closed, that count is missing."""
    clocks = ThreadClocks()
    try:
        first = read_clocks()
        while time.process_time() < first.cpu_s + 0.02:
            pass
        between, last = clocks.read(), read_clocks()
    finally:
        clocks.close()
        clocks.close()
    for before, after_it in zip(first[:2], between[:2], strict=True):
        assert after_it > before
    assert between.now <= last.now
    assert between.cpu_s <= last.cpu_s
    if last.waited_s is not None:
        assert first.waited_s is not None
        assert between.waited_s is not None
        assert first.waited_s <= between.waited_s <= last.waited_s
    assert clocks.read().waited_s is None


def test_a_starved_daemon_warns_until_it_has_not_happened_for_a_while() -> None:
    timers = LateTimers()
    assert timers.warnings(0.0) == {}
    timers.add(Lateness(1.5, Cause.STARVED), 1000.0)
    timers.add(Lateness(9.25, Cause.STARVED), 1010.0)
    warning = timers.warnings(1022.0)[Cause.STARVED]
    found, _, todo = warning.partition("; ")
    assert "the node starves this daemon" in found
    assert "by up to 9.2 s, 2 times, last 12 s ago" in found
    assert "AllowedCPUs=" in todo
    assert timers.warnings(1010.0 + CLEAR_AFTER_S)
    assert timers.warnings(1010.1 + CLEAR_AFTER_S) == {}
    # The next one begins anew.
    timers.add(Lateness(0.6, Cause.STARVED), 5000.0)
    assert "by up to 0.6 s, once, last 0 s ago" in timers.warnings(5000.0)[Cause.STARVED]


def test_the_daemon_s_own_work_is_named_as_such_and_a_stop_is_no_warning() -> None:
    timers = LateTimers()
    timers.add(Lateness(60.0, Cause.STOPPED), 10.0)
    assert timers.warnings(10.0) == {}
    timers.add(Lateness(0.8, Cause.BUSY), 11.0)
    warning = timers.warnings(11.0)[Cause.BUSY]
    assert "computed" in warning
    assert "starves" not in warning


def test_the_watch_warns_logs_and_counts() -> None:
    """A real event loop, and clocks that are passed in."""

    def clocks() -> Iterator[ClockReading]:
        yield ClockReading(0.0, 0.0, 0.0)
        yield ClockReading(9.0, 0.0, 8.9)  # starved
        yield ClockReading(69.0, 0.0, 8.9)  # stopped
        while True:
            yield ClockReading(69.0, 0.0, 8.9)

    metrics, readings = Metrics(node_snapshot), clocks()

    async def run() -> list[WarningCondition]:
        done = asyncio.Event()

        def on_late(lateness: Lateness) -> None:
            metrics.record_late_timer(lateness)
            if lateness.cause is Cause.STOPPED:
                done.set()

        watch = TimerWatch(on_late, lambda: next(readings), interval_s=0.0)
        watch.start()
        try:
            await asyncio.wait_for(done.wait(), 30)
            return watch.findings()
        finally:
            watch.stop()

    with structlog.testing.capture_logs() as lines:
        (warning,) = asyncio.run(run())
    assert (warning.kind, warning.subject) == (WarningKind.TIMERS_LATE, "starved")
    assert "starves" in warning.message
    assert [(line["log_level"], line["event"], line["cause"]) for line in lines] == [
        ("warning", "timers late", "starved"),
        ("info", "timers late", "stopped"),
    ]
    text = metrics.render().decode()
    assert 'kvxferd_late_timers_total{cause="starved"} 1.0' in text
    assert 'kvxferd_late_timer_seconds_total{cause="starved"} 9.0' in text
    assert 'kvxferd_late_timers_total{cause="busy"} 0.0' in text
