"""The results of a demo so far: counts, times, and whether all bytes were right."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvxferd.core.snapshot import PHASES, PullRecord
from kvxferd.demo import protocol
from kvxferd.demo.shape import DemoShape
from kvxferd.ids import PullId, Rank


@dataclass(slots=True)
class DemoResults:
    """One run of the demo. A pull is one decode rank's read of one request."""

    shape: DemoShape
    daemons_ready_s: float = 0.0
    registered_s: float = 0.0
    first_request_s: float = 0.0  # from the first pull's call to its last event: handshakes included
    requests: int = 0
    pulls: int = 0
    delivered: int = 0
    bytes: int = 0
    runs: int = 0
    checked_items: int = 0
    wrong_items: int = 0
    spilled_bytes: int = 0
    first_wrong: str = ""
    failures: Counter[str] = field(default_factory=Counter)
    first_failure: str = ""
    releases: Counter[str] = field(default_factory=Counter)
    pull_s: list[float] = field(default_factory=list)
    request_s: list[float] = field(default_factory=list)
    records: dict[PullId, PullRecord] = field(default_factory=dict)
    error: str = ""  # why the demo ended early

    @property
    def failed(self) -> int:
        """The number of pulls that failed."""
        return self.pulls - self.delivered

    @property
    def is_ok(self) -> bool:
        """Whether every requested byte arrived, and no other byte changed."""
        return (
            not self.error
            and self.requests == self.shape.requests
            and self.delivered == self.pulls == self.requests * len(self.shape.ranks("decode"))
            and self.wrong_items == 0
            and self.spilled_bytes == 0
        )

    @property
    def gb_per_s(self) -> float:
        """Delivered bytes divided by the time in which pulls were running, in 10^9 bytes per second."""
        spent = sum(self.request_s)
        return self.bytes / spent / 1e9 if spent else 0.0

    def ways(self) -> dict[str, int]:
        """Return the bytes that were read in each way, as the daemon's history has them."""
        ways: Counter[str] = Counter()
        for record in self.records.values():
            ways.update(record.ways)
        return dict(ways)

    def add_request(self, pulled: dict[Rank, protocol.PullResult]) -> None:
        """Add what every decode rank reported of one request."""
        self.requests += 1
        self.request_s.append(max(one.elapsed_s for one in pulled.values()))
        if self.requests == 1:
            self.first_request_s = self.request_s[0]
        for rank, one in pulled.items():
            self._add_pull(rank, one)

    def add_records(self, records: list[PullRecord]) -> None:
        """Add a daemon's history of pulls; records that were added before change nothing."""
        self.records.update({record.pull: record for record in records})

    def as_json(self) -> dict[str, Any]:
        """Return everything as one plain object."""
        return {
            "ok": self.is_ok,
            "error": self.error,
            "prefill": str(self.shape.prefill),
            "decode": str(self.shape.decode),
            "requests": self.requests,
            "pulls": self.pulls,
            "delivered": self.delivered,
            "failed": self.failed,
            "failures": dict(self.failures),
            "first_failure": self.first_failure,
            "bytes": self.bytes,
            "runs": self.runs,
            "checked_items": self.checked_items,
            "wrong_items": self.wrong_items,
            "spilled_bytes": self.spilled_bytes,
            "first_wrong": self.first_wrong,
            "releases": dict(self.releases),
            "ways": self.ways(),
            "gb_per_s": round(self.gb_per_s, 3),
            "daemons_ready_s": round(self.daemons_ready_s, 4),
            "registered_s": round(self.registered_s, 4),
            "first_request_s": round(self.first_request_s, 6),
            "pull_s": summarize_times(self.pull_s),
            "phases_s": self.phases(),
        }

    def phases(self) -> dict[str, dict[str, float]]:
        """Return the times of each phase over the delivered pulls, in the order of the phases."""
        delivered = [record for record in self.records.values() if record.outcome == "delivered"]
        return {
            phase: summarize_times(times)
            for phase in PHASES
            if (times := [record.phases_s[phase] for record in delivered if phase in record.phases_s])
        }

    def _add_pull(self, rank: Rank, one: protocol.PullResult) -> None:
        self.pulls += 1
        self.checked_items += one.checked_items
        self.wrong_items += one.wrong_items
        self.spilled_bytes += one.spilled_bytes
        where = f"request {self.requests - 1}, {rank}"
        if one.first_wrong and not self.first_wrong:
            self.first_wrong = f"{where}: {one.first_wrong}"
        if one.delivered:
            self.delivered += 1
            self.bytes += one.bytes
            self.runs += one.runs
            self.pull_s.append(one.elapsed_s)
        else:
            self.failures[one.code] += 1
            self.first_failure = self.first_failure or f"{where}: {one.message} [{one.code}]"


def summarize_times(times: list[float]) -> dict[str, float]:
    """Return median, 99th percentile and mean in seconds; zeros if there are no times."""
    if not times:
        return {"p50": 0.0, "p99": 0.0, "mean": 0.0}
    p50, p99 = np.percentile(times, [50, 99])
    return {"p50": round(float(p50), 6), "p99": round(float(p99), 6), "mean": round(float(np.mean(times)), 6)}
