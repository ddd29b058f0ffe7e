"""What the connector counts between two looks of vLLM's metrics: plain data that travels and adds up."""

from __future__ import annotations

from typing import Any

from kvxferd.errors import Code

_LISTS = ("pull_s", "wire_s", "bytes", "runs")
_COUNTS = ("pulls_failed", "publishes_failed", "released_unread")


def empty() -> dict[str, Any]:
    """An interval in which nothing happened: observations of each pull, counts by code."""
    return {**{name: [] for name in _LISTS}, **{name: {} for name in _COUNTS}}


def is_empty(counted: dict[str, Any]) -> bool:
    """Whether nothing happened."""
    return not any(counted.values())


def add(total: dict[str, Any], more: dict[str, Any]) -> None:
    """Add another side's or rank's interval to `total`."""
    for name in _LISTS:
        total[name].extend(more[name])
    for name in _COUNTS:
        for code, count in more[name].items():
            total[name][code] = total[name].get(code, 0) + count


def summary(counted: dict[str, Any]) -> dict[str, int | float]:
    """One line for vLLM's log: milliseconds, MiB, and failures."""
    pulls, megabytes = len(counted["pull_s"]), sum(counted["bytes"]) / 2**20
    durations = sorted(counted["pull_s"])
    said: dict[str, int | float] = {"Num pulls": pulls}
    if pulls:
        said["Median pull (ms)"] = round(durations[pulls // 2] * 1e3, 3)
        said["Slowest pull (ms)"] = round(durations[-1] * 1e3, 3)
        said["MiB per pull"] = round(megabytes / pulls, 3)
    for name, words in (
        ("pulls_failed", "Num failed pulls"),
        ("publishes_failed", "Num failed publishes"),
        ("released_unread", "Num released unread"),
    ):
        said[words] = sum(counted[name].values())
    return said


class ConnectorStats:
    """One interval being counted. One thread."""

    def __init__(self) -> None:
        self._interval = empty()

    def record_pull(self, pull_s: float, wire_s: float, num_bytes: int, num_runs: int) -> None:
        """A pull was delivered; `pull_s` is from the order until the worker heard of it."""
        for name, value in zip(_LISTS, (pull_s, wire_s, num_bytes, num_runs), strict=True):
            self._interval[name].append(value)

    def record_failed_pull(self, code: Code) -> None:
        """A pull failed, or could not be asked for."""
        self._count("pulls_failed", code)

    def record_failed_publish(self, code: Code) -> None:
        """A request could not be published: its reader computes it."""
        self._count("publishes_failed", code)

    def record_unread_release(self, code: Code) -> None:
        """A published request was released before its readers had it."""
        self._count("released_unread", code)

    def collect(self) -> dict[str, Any] | None:
        """Return the interval and begin the next; None where nothing happened."""
        if is_empty(self._interval):
            return None
        counted, self._interval = self._interval, empty()
        return counted

    def _count(self, name: str, code: Code) -> None:
        counts = self._interval[name]
        counts[code.value] = counts.get(code.value, 0) + 1
