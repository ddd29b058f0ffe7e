"""The timer of the warnings: log lines at beginning and end, and the metrics."""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from kvxferd.telemetry.warnings.kinds import HOLD_S, WarningKind
from kvxferd.telemetry.warnings.warning_list import WarningCondition
from kvxferd.telemetry.warnings.warning_watch import MAX_AGE_S, WarningWatch

FINDING = WarningCondition(WarningKind.PLACEMENT, "staged", "it is slow", "look at it")


class Node:
    """A check whose findings and clock a test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self.found: list[WarningCondition] = []
        self.watch = WarningWatch([_failing, self.check], lambda: self.now, lambda: 1e9 + self.now)

    def check(self) -> Iterable[WarningCondition]:
        return self.found


def _failing() -> Iterable[WarningCondition]:
    raise ValueError("a bug of a check")


def test_beginning_and_end_are_one_line_each_though_another_check_fails() -> None:
    node = Node()
    with structlog.testing.capture_logs() as logged:
        for found in ([], [FINDING], [FINDING], [], []):
            node.found = found
            node.watch.renew()
            node.now += HOLD_S
    lines = [line for line in logged if line["event"].startswith("warning ") and "kind" in line]
    assert [(line["event"], line["log_level"]) for line in lines] == [
        ("warning began", "warning"),
        ("warning ended", "info"),
    ]
    began, ended = lines
    assert began["kind"] == "placement"
    assert began["text"] == "it is slow; look at it"
    assert ended["lasted_s"] == 2 * HOLD_S
    assert {line["event"] for line in logged} - {"warning began", "warning ended"} == {"warning check failed"}


def test_readers_share_what_is_not_old() -> None:
    node = Node()
    node.watch.renew()
    node.found = [FINDING]
    assert node.watch.warnings() == []
    node.now += 2 * MAX_AGE_S
    assert [warning.since for warning in node.watch.warnings()] == [1e9 + node.now]
