"""Movers without a processor, and movers that crash again and again."""

from __future__ import annotations

from kvxferd.telemetry.warnings.mover_checks import (
    CRASH_CLEAR_S,
    CRASH_WINDOW_S,
    CRASHES,
    MAX_ENGINES,
    CrashingMovers,
    MoverClocks,
    StarvedMovers,
    clocks_of,
    parse_schedstat,
    stopped_movers,
)


class Movers:
    """Movers that are read each five seconds."""

    def __init__(self) -> None:
        self.check = StarvedMovers()
        self.now = self.ran_s = self.waited_s = 0.0

    def interval(self, ran_s: float, waited_s: float) -> list[str]:
        self.now += 5.0
        self.ran_s += ran_s
        self.waited_s += waited_s
        self.check.update([MoverClocks(7, "decode-0", self.ran_s, self.waited_s)], self.now)
        return [finding.message for finding in self.check.findings()]


def test_a_mover_that_waits_for_a_processor_twice_in_a_row_is_starved() -> None:
    movers = Movers()
    assert movers.interval(1.0, 3.0) == []  # nothing to compare with
    assert movers.interval(1.0, 3.0) == []  # once
    assert movers.interval(1.0, 3.0) == [
        "a mover of engine decode-0 (pid 7) has no processor for 60% of the time"
    ]
    assert movers.interval(0.5, 0.3)  # 6 %: less, and not over
    assert movers.interval(0.5, 0.1) == []


def test_a_mover_that_runs_most_of_the_time_is_not_starved() -> None:
    movers = Movers()
    for _ in range(4):
        assert movers.interval(4.2, 0.7) == []


def test_an_idle_mover_and_one_of_a_reused_pid_are_not_starved() -> None:
    movers = Movers()
    for _ in range(4):
        assert movers.interval(0.001, 0.01) == []
    for _ in range(3):
        movers.ran_s -= 1.0  # each time another process
        assert movers.interval(0.0, 5.0) == []


def test_schedstat_is_parsed_and_unknown_where_the_kernel_does_not_count() -> None:
    assert parse_schedstat(b"2000000000 500000000 12\n") == (2.0, 0.5)
    assert parse_schedstat(b"0 0 0\n") is None
    assert parse_schedstat(b"") is None
    assert clocks_of({1: "a", 2: "b", 3: "c"}, {1: b"1 1 1", 3: b"0 0 0"}) == [
        MoverClocks(1, "a", 1e-9, 1e-9)
    ]


def test_movers_that_crash_again_and_again_are_named_until_they_stop() -> None:
    crashes = CrashingMovers()
    for number in range(CRASHES):
        assert crashes.findings(float(number)) == []
        crashes.record("decode-0", float(number))
    (finding,) = crashes.findings(3.0)
    assert finding.message == "movers of engine decode-0 crash: 3 in the last 120 s, the last 1 s ago"
    assert crashes.findings(2.0 + CRASH_CLEAR_S)
    assert crashes.findings(2.1 + CRASH_CLEAR_S) == []


def test_a_crash_now_and_then_is_no_loop() -> None:
    crashes = CrashingMovers()
    for number in range(10):
        now = number * CRASH_WINDOW_S / (CRASHES - 1) + number
        crashes.record("decode-0", now)
        assert crashes.findings(now) == []


def test_engines_are_bounded() -> None:
    crashes = CrashingMovers()
    for number in range(3 * MAX_ENGINES):
        crashes.record(f"e{number}", 1.0)
    assert len(crashes._crashes) == MAX_ENGINES


def test_a_stopped_mover_is_named_with_its_pid() -> None:
    stats = {7: b"7 (a) T (b) S 1", 8: b"8 (kvxferd-mover) T 1 8", 9: b"9 (kvxferd-mover) R 1 9"}
    (finding,) = stopped_movers({7: "a", 8: "b", 9: "c", 10: "d"}, stats)
    assert (finding.subject, finding.remedy.endswith("kill -CONT 8")) == ("b", True)
