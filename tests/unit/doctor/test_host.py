"""Doctor measures how late it wakes up: with clocks that are passed in."""

from __future__ import annotations

import pytest

from kvxferd.doctor.host import MEASURE_S, SLEEP_S, judge_wake_ups, measure_wake_ups
from kvxferd.doctor.report import Verdict
from kvxferd.telemetry.late_timers import Cause, ClockReading


class SlowMachine:
    """Clocks, and a sleep that lasts too long."""

    def __init__(self, stalls_s: dict[int, float], waits: float = 1.0) -> None:
        self.now = self.waited_s = 0.0
        self.num_sleeps = 0
        self.stalls_s = stalls_s  # by number of the sleep
        self.waits = waits  # share of the stall that it is ready to run

    def read(self) -> ClockReading:
        return ClockReading(self.now, 0.0, self.waited_s)

    def sleep(self, seconds: float) -> None:
        stall_s = self.stalls_s.get(self.num_sleeps, 0.001)
        self.num_sleeps += 1
        self.now += seconds + stall_s
        self.waited_s += self.waits * stall_s


def test_a_quiet_machine_is_ok_after_two_seconds() -> None:
    machine = SlowMachine({7: 0.4})
    measured = measure_wake_ups(machine.read, machine.sleep)
    assert MEASURE_S <= machine.now < MEASURE_S + 2 * SLEEP_S
    assert measured.num_sleeps == machine.num_sleeps
    assert measured.latest_s == pytest.approx(0.4)
    found = judge_wake_ups(measured, 2)
    assert found.verdict is Verdict.OK
    assert "400.0 ms" in found.found


@pytest.mark.parametrize(("waits", "cause"), [(1.0, Cause.STARVED), (0.0, Cause.STOPPED)])
def test_a_stall_ends_the_measurement_and_is_a_warning_that_says_why(waits: float, cause: Cause) -> None:
    machine = SlowMachine({3: 0.7, 5: 9.0}, waits)
    found = judge_wake_ups(measure_wake_ups(machine.read, machine.sleep), 2)
    assert machine.num_sleeps == 6
    assert found.verdict is Verdict.WARN
    assert "9.0 s late" in found.found
    assert found.facts["cause"] == cause.value
    assert ("AllowedCPUs=" in found.todo) == (cause is Cause.STARVED)
