"""Series for each engine pair and each peer: off unless wanted, bounded in number, without odd characters."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from kvxferd.ids import Endpoint
from kvxferd.records import PULL_OUTCOMES, PullRecord, ServedRecord
from kvxferd.wire.endpoint import address_of

# 64 pairs and 64 peers are 910 series, up to 118 kB of a scrape.
MAX_SERIES = 64
# A row that nothing has used for this long is given to a newcomer.
IDLE_S = 600.0
OTHER = "other"
MAX_LABEL_CHARS = 64

_ODD = re.compile(r"[^A-Za-z0-9._:/\[\]-]")

Key = tuple[str, ...]


def clean_label(text: str) -> str:
    """Return a name from outside as a label: short, of letters, digits and a few signs."""
    return _ODD.sub("_", text[:MAX_LABEL_CHARS]) or "_"


@dataclass(slots=True)
class Row:
    """What is counted for one key."""

    used_at: float = 0.0
    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PULL_OUTCOMES, 0))
    pulled_bytes: int = 0
    pull_s: float = 0.0
    served_pulls: int = 0
    served_bytes: int = 0

    def add(self, other: Row) -> None:
        """Add what another row has counted."""
        for outcome, num in other.outcomes.items():
            self.outcomes[outcome] += num
        self.pulled_bytes += other.pulled_bytes
        self.pull_s += other.pull_s
        self.served_pulls += other.served_pulls
        self.served_bytes += other.served_bytes


class BoundedRows:
    """Rows by key: `MAX_SERIES` at most, and one for what finds no place, which keeps what others had."""

    def __init__(self, num_labels: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._other = (OTHER,) * num_labels
        self.rows: dict[Key, Row] = {}  # the longest unused first

    def row_of(self, *names: str) -> Row:
        """Return the row of these names, a new one, or that of the others."""
        now = self._clock()
        key = tuple(map(clean_label, names))
        row = self.rows.pop(key, None)
        if row is None and not self._has_room(now):
            key = self._other
            row = self.rows.pop(key, None)
        row = row or Row()
        row.used_at = now
        self.rows[key] = row
        return row

    def _has_room(self, now: float) -> bool:
        if len(self.rows) - (self._other in self.rows) < MAX_SERIES:
            return True
        oldest = next(key for key in self.rows if key != self._other)
        if now - self.rows[oldest].used_at <= IDLE_S:
            return False
        self._remove(oldest)
        return True

    def _remove(self, key: Key) -> None:
        removed = self.rows.pop(key)
        self.rows.setdefault(self._other, Row(used_at=removed.used_at)).add(removed)


class EngineAndPeerCollector(Collector):
    """Counts pulls by engine pair, and by peer, each where it is switched on."""

    def __init__(
        self, *, by_engine: bool, by_peer: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pairs = BoundedRows(2, clock) if by_engine else None
        self._peers = BoundedRows(1, clock) if by_peer else None

    @property
    def is_on(self) -> bool:
        """Whether anything is counted."""
        return self._pairs is not None or self._peers is not None

    def record_pull(self, record: PullRecord) -> None:
        """Count a pull that ended."""
        for row in self._rows_of(record.source, record.sink, record.peer):
            row.outcomes[record.outcome] += 1
            if record.outcome == "delivered":
                row.pulled_bytes += max(record.bytes, 0)
                row.pull_s += record.total_s

    def record_served(self, served: ServedRecord) -> None:
        """Count what a reading rank acknowledged."""
        for row in self._rows_of(served.source, served.sink, served.peer):
            row.served_pulls += 1
            row.served_bytes += served.bytes

    def _rows_of(self, source: str, sink: str, peer: str) -> Iterator[Row]:
        if self._pairs is not None:
            yield self._pairs.row_of(source, sink)
        if self._peers is not None:
            yield self._peers.row_of(address_of(Endpoint(peer)).removeprefix("tcp://"))

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the families of what is switched on."""
        if self._pairs is not None:
            yield from _families("engine", ["source", "sink"], self._pairs.rows)
        if self._peers is not None:
            yield from _families("peer", ["peer"], self._peers.rows)


def _families(kind: str, labels: list[str], rows: dict[Key, Row]) -> Iterator[CounterMetricFamily]:
    what = "source and sink engine" if kind == "engine" else "peer"
    pulls = CounterMetricFamily(
        f"kvxferd_{kind}_pulls", f"Pulls that ended, by {what}.", labels=[*labels, "outcome"]
    )
    for key, row in rows.items():
        for outcome, num in row.outcomes.items():
            pulls.add_metric([*key, outcome], num)
    yield pulls
    values: dict[str, tuple[str, Callable[[Row], float]]] = {
        "pulled_bytes": ("Bytes of delivered pulls", lambda row: row.pulled_bytes),
        "pull_seconds": ("Time of delivered pulls, summed", lambda row: row.pull_s),
        "served_pulls": (
            "Pulls of this node's transfers that were acknowledged",
            lambda row: row.served_pulls,
        ),
        "served_bytes": (
            "Bytes of this node's transfers that readers acknowledged",
            lambda row: row.served_bytes,
        ),
    }
    for name, (text, value_of) in values.items():
        family = CounterMetricFamily(f"kvxferd_{kind}_{name}", f"{text}, by {what}.", labels=labels)
        for key, row in rows.items():
            family.add_metric(list(key), value_of(row))
        yield family
