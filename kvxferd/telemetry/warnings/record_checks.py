"""The checks that read the records of ended pulls."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvxferd.core.snapshot import PullRecord, Record
from kvxferd.ids import Endpoint
from kvxferd.telemetry.warnings.failing_pulls import FailingPulls
from kvxferd.telemetry.warnings.first_pulls import SlowFirstPulls
from kvxferd.telemetry.warnings.read_speed import MispredictedReads, SlowPeers
from kvxferd.telemetry.warnings.warning_list import Finding


class RecordChecks:
    """Gives each pull's record to every check."""

    def __init__(self, own_endpoint: Endpoint, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._checks = (FailingPulls(), SlowPeers(own_endpoint), MispredictedReads(), SlowFirstPulls())

    def record(self, record: Record) -> None:
        """Take over a record."""
        if isinstance(record, PullRecord):
            now = self._clock()
            for check in self._checks:
                check.record(record, now)

    def findings(self) -> list[Finding]:
        """Return what every check finds now."""
        now = self._clock()
        return [finding for check in self._checks for finding in check.findings(now)]
