"""Records that an operator looks for, kept apart from the rest: failed pulls, the slowest, expired leases.

At 500 pulls a second the history's 1,024 records are two seconds old: a failure of the last minute would be
gone. Each list here has its own limit, 400 records in all, under 1 KiB each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from kvxferd.errors import Code
from kvxferd.records import PullRecord, Record, ReleaseRecord

MAX_FAILED = 256
MAX_EXPIRED = 64
# The slowest delivered pulls of each of the last fifteen minutes.
NUM_MINUTES = 15
MAX_SLOWEST_A_MINUTE = 6


class NotableRecords:
    """The last failed pulls and expired leases, and the slowest pulls of 15 minutes."""

    def __init__(self) -> None:
        self._failed: deque[PullRecord] = deque(maxlen=MAX_FAILED)
        self._expired: deque[ReleaseRecord] = deque(maxlen=MAX_EXPIRED)
        self._slowest: dict[int, list[PullRecord]] = {}  # by minute, the oldest first; each in no order

    def add(self, record: Record) -> None:
        """Keep the record if it is one of those."""
        match record:
            case PullRecord(outcome="delivered"):
                self._add_delivered(record)
            case PullRecord() if record.has_failed:
                self._failed.append(record)
            case ReleaseRecord(why=Code.LEASE_EXPIRED):
                self._expired.append(record)

    def failed(self) -> list[PullRecord]:
        """Return the last failed pulls, the latest first. Those that were cancelled are none."""
        return list(reversed(self._failed))

    def expired(self) -> list[ReleaseRecord]:
        """Return the last transfers whose lease expired, the latest first."""
        return list(reversed(self._expired))

    def slowest(self, now: float) -> list[PullRecord]:
        """Return the slowest delivered pulls of the last 15 minutes, the slowest first. `now`: Unix time."""
        recent = [
            pull
            for minute, pulls in self._slowest.items()
            if minute > now // 60 - NUM_MINUTES
            for pull in pulls
        ]
        return sorted(recent, key=lambda pull: -pull.total_s)

    def __iter__(self) -> Iterator[PullRecord | ReleaseRecord]:
        """Iterate over all of them."""
        yield from self._failed
        yield from self._expired
        for pulls in self._slowest.values():
            yield from pulls

    def _add_delivered(self, record: PullRecord) -> None:
        minute = int(record.ended_at // 60)
        pulls = self._slowest.get(minute)
        if pulls is None:
            pulls = self._slowest[minute] = []
            # Also of a clock that was set back: the first in the table is the oldest that was made.
            while len(self._slowest) > NUM_MINUTES:
                del self._slowest[next(iter(self._slowest))]
        if len(pulls) < MAX_SLOWEST_A_MINUTE:
            pulls.append(record)
            return
        fastest = min(range(len(pulls)), key=lambda index: pulls[index].total_s)
        if record.total_s > pulls[fastest].total_s:
            pulls[fastest] = record
