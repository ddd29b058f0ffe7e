"""The connector's counters of one interval of vLLM's metrics: plain data, which is sent and added up."""

from __future__ import annotations

from typing import Any

from kvxferd.errors import Code

_LISTS = ("pull_s", "wire_s", "bytes", "runs")
_COUNTS = ("pulls_failed", "publishes_failed", "released_unread")


def empty() -> dict[str, Any]:
    """Return an empty interval: observations of each pull, counts by code."""
    return {**{name: [] for name in _LISTS}, **{name: {} for name in _COUNTS}}


def is_empty(counted: dict[str, Any]) -> bool:
    """Whether nothing was counted."""
    return not any(counted.values())


def add(total: dict[str, Any], more: dict[str, Any]) -> None:
    """Add the interval of another rank, or of the scheduler, to `total`."""
    for name in _LISTS:
        total[name].extend(more[name])
    for name in _COUNTS:
        for code, count in more[name].items():
            total[name][code] = total[name].get(code, 0) + count


def summary(counted: dict[str, Any]) -> dict[str, int | float]:
    """Return the figures of vLLM's log line: milliseconds, MiB, and failures."""
    pulls, megabytes = len(counted["pull_s"]), sum(counted["bytes"]) / 2**20
    durations = sorted(counted["pull_s"])
    figures: dict[str, int | float] = {"Num pulls": pulls}
    if pulls:
        figures["Median pull (ms)"] = round(durations[pulls // 2] * 1e3, 3)
        figures["Slowest pull (ms)"] = round(durations[-1] * 1e3, 3)
        figures["MiB per pull"] = round(megabytes / pulls, 3)
    for name, words in (
        ("pulls_failed", "Num failed pulls"),
        ("publishes_failed", "Num failed publishes"),
        ("released_unread", "Num released unread"),
    ):
        figures[words] = sum(counted[name].values())
    return figures


class ConnectorStats:
    """Counts one interval. It is used by one thread."""

    def __init__(self) -> None:
        self._interval = empty()

    def record_pull(self, pull_s: float, wire_s: float, num_bytes: int, num_runs: int) -> None:
        """Count a delivered pull; `pull_s` is from its start until the worker received `Delivered`."""
        for name, value in zip(_LISTS, (pull_s, wire_s, num_bytes, num_runs), strict=True):
            self._interval[name].append(value)

    def record_failed_pull(self, code: Code) -> None:
        """Count a pull that failed or could not be started."""
        self._count("pulls_failed", code)

    def record_failed_publish(self, code: Code) -> None:
        """Count a request that could not be published: its reader computes it."""
        self._count("publishes_failed", code)

    def record_unread_release(self, code: Code) -> None:
        """Count a published request that was released before its readers had it."""
        self._count("released_unread", code)

    def collect(self) -> dict[str, Any] | None:
        """Return the interval and begin the next; None where nothing was counted."""
        if is_empty(self._interval):
            return None
        counted, self._interval = self._interval, empty()
        return counted

    def _count(self, name: str, code: Code) -> None:
        counts = self._interval[name]
        counts[code.value] = counts.get(code.value, 0) + 1
