"""Renews the list of warnings each second, and logs those that begin and end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import structlog

from kvxferd.telemetry.warnings.kinds import WarningKind
from kvxferd.telemetry.warnings.warning_list import NodeWarning, WarningChange, WarningCondition, WarningList

log = structlog.get_logger()

INTERVAL_S = 1.0
# A reader renews what is older. Anybody may read `/readyz` in a loop, and the checks look at every rank.
MAX_AGE_S = 0.1


class WarningWatch:
    """Asks every check for its findings, by a timer of the event loop and for each reader."""

    def __init__(
        self,
        checks: Iterable[Callable[[], Iterable[WarningCondition]]],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._checks = tuple(checks)
        self._clock = clock
        self._wall_clock = wall_clock
        self._list = WarningList()
        self._renewed_at = float("-inf")
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Set the first timer. What is found now began with the daemon: `configuration warning` logs it."""
        self.renew(is_logged=False)
        self._set()

    def stop(self) -> None:
        """Set no more timers."""
        if self._timer is not None:
            self._timer.cancel()

    def renew(self, *, is_logged: bool = True) -> None:
        """Take over what every check finds now."""
        self._renewed_at = self._clock()
        findings = [finding for check in self._checks for finding in _run(check)]
        for change in self._list.update(findings, self._renewed_at, self._wall_clock()):
            if is_logged:
                _log_change(change)

    def warnings(self) -> list[NodeWarning]:
        """Return the current warnings, oldest first."""
        if self._clock() - self._renewed_at >= MAX_AGE_S:
            self.renew()
        return self._list.warnings()

    def count(self, kind: WarningKind) -> int:
        """Return how many warnings of that kind there were at the last renewal."""
        return self._list.count(kind)

    def _set(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._fire)

    def _fire(self) -> None:
        self._set()
        self.renew()


def _run(check: Callable[[], Iterable[WarningCondition]]) -> list[WarningCondition]:
    try:
        return list(check())
    except Exception:  # a bug of one check: the others go on, and readiness is still reported
        log.exception("warning check failed")
        return []


def _log_change(change: WarningChange) -> None:
    warning = change.warning
    if change.what == "began":
        log.warning(
            "warning began",
            limit_by=warning.kind.value,
            kind=warning.kind.value,
            subject=warning.subject,
            text=warning.text,
            page=warning.page,
        )
    else:
        log.info(
            "warning ended",
            limit_by=warning.kind.value,
            kind=warning.kind.value,
            subject=warning.subject,
            lasted_s=round(change.lasted_s, 1),
        )
