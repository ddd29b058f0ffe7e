"""What a node did in the last 15 minutes, in slots of ten seconds: for `/v1/samples` and the command line.

Records are summed in the present slot as they come. `tick` begins the next slot, so a slot in which the loop
did not run, or the process was stopped, is missing. Pairs of engines and peers are summed too: the first
64 of each in a slot have a row, and all others have one. 91 full slots take 6 MB, a report of them 32 ms.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvxferd.errors import Code
from kvxferd.records import PHASES, PullRecord, Record

RING_S = 900
MINUTE_S = 60
SLOT_S = 10
MAX_KEYS = 64
MAX_SLOWEST_A_SLOT = 2
OTHERS = "(others)"  # the row of the pairs, or peers, that have none of their own

# Four buckets for each doubling, 100 us to 210 s: a quantile is within a tenth of the truth.
BOUNDS_S = tuple(100e-6 * 2 ** (step / 4) for step in range(85))
# Of fewer pulls a quantile is the time of one of them: no number that an operator could compare.
MIN_QUANTILE_PULLS = 20

# Sizes are what a resident mover reports: any number. JSON's integers have 64 bits.
_MAX_SUM = 1 << 62


class SumsRow(msgspec.Struct, frozen=True, kw_only=True):
    """Pulls that ended, in numbers."""

    delivered: int = 0
    failed: int = 0
    pulled_bytes: int = 0
    mean_s: float | None = None  # of delivered pulls, arrival to delivery
    p50_s: float | None = None  # None for fewer than `MIN_QUANTILE_PULLS`
    p99_s: float | None = None
    last_code: str = ""  # of the last failed pull
    last_failed_at: float = 0.0  # Unix time; 0: none


class PairRow(SumsRow, frozen=True, kw_only=True):
    """The pulls of one local engine from one other; `OTHERS` for all pairs that have no row."""

    source: str
    sink: str


class PeerRow(SumsRow, frozen=True, kw_only=True):
    """The pulls from one daemon; `OTHERS` for all that have no row."""

    peer: str


class NodeRow(SumsRow, frozen=True, kw_only=True):
    """What the node did in some time."""

    served_bytes: int  # that other pulls read from this node, counted when they acknowledge
    failures: dict[str, int]  # failed pulls by code, the commonest first, then the latest


class SlotRow(NodeRow, frozen=True, kw_only=True):
    """What the node did in one slot."""

    at: int  # Unix time of its end, or of now
    span_s: float  # how long it was: less than `SLOT_S` at the start and for the present one
    phases_s: dict[str, float]  # seconds that pulls which ended spent in each phase


class LastMinute(NodeRow, frozen=True, kw_only=True):
    """What a node did in its last 60 to 70 seconds, or since it serves."""

    seconds: float  # how long that was
    failure_share: float  # failed / (delivered + failed), 0 to 1
    pulled_bytes_per_s: float
    served_bytes_per_s: float
    worst_code: str  # the commonest code of a failed pull, then the latest; "" without one
    worst_peer: str  # the daemon from which most of those should have come; "" if not known


class SampleReport(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of `/v1/samples`, which adds what else is known of each peer, and records."""

    slots: list[SlotRow | None]  # oldest first, the present one last; None: the daemon did not run
    # Of the same time. Most failures first, then most bytes.
    pairs: list[PairRow]
    peers: list[PeerRow]


class _Sums:
    """What is counted of pulls: of a node, of a pair of engines, or from a peer."""

    __slots__ = ("delivered", "elapsed_s", "failures", "last_code", "last_failed_at", "pulled_bytes", "times")

    def __init__(self) -> None:
        self.delivered = self.pulled_bytes = 0
        self.elapsed_s = self.last_failed_at = 0.0
        self.times: dict[
            int, int
        ] = {}  # delivered pulls by bucket of `BOUNDS_S`; the last is of longer times
        self.failures: dict[str, int] = {}  # failed pulls by code
        self.last_code = ""

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    def add(self, record: PullRecord) -> None:
        """Count a pull that was delivered, or failed."""
        if record.outcome != "delivered":
            code = record.code.value if record.code is not None else Code.INTERNAL.value
            self.failures[code] = self.failures.pop(code, 0) + 1  # the latest is the last
            self.last_code, self.last_failed_at = code, record.ended_at
            return
        self.delivered += 1
        self.pulled_bytes = min(self.pulled_bytes + max(record.bytes, 0), _MAX_SUM)
        self.elapsed_s += record.total_s
        bucket = bisect_left(BOUNDS_S, record.total_s)
        self.times[bucket] = self.times.get(bucket, 0) + 1

    @classmethod
    def total(cls, parts: Sequence[_Sums]) -> _Sums:
        """Return the sum of them."""
        found, last = cls(), max(parts, key=lambda part: part.last_failed_at)
        found.delivered = sum(part.delivered for part in parts)
        found.pulled_bytes = min(sum(part.pulled_bytes for part in parts), _MAX_SUM)
        found.elapsed_s = sum(part.elapsed_s for part in parts)
        failures: Counter[str] = Counter()
        for part in reversed(parts):  # of two codes that are as common the latest comes first
            for bucket, count in part.times.items():
                found.times[bucket] = found.times.get(bucket, 0) + count
            for code, count in reversed(part.failures.items()):
                failures[code] += count
        found.failures = dict(failures.most_common())
        found.last_code, found.last_failed_at = last.last_code, last.last_failed_at
        return found

    def quantile(self, share: float) -> float | None:
        """Return the time that `share` of the delivered pulls do not exceed; evenly spread in a bucket."""
        if self.delivered < MIN_QUANTILE_PULLS:
            return None
        rank = share * self.delivered
        for bucket, count in sorted(self.times.items()):
            if rank <= count:
                low = BOUNDS_S[bucket - 1] if bucket else 0.0
                high = BOUNDS_S[min(bucket, len(BOUNDS_S) - 1)]
                return float(f"{low + rank / count * (high - low):.3g}")
            rank -= count
        raise AssertionError("the buckets hold every delivered pull")

    def row(self) -> dict[str, Any]:
        """Return the fields of a `SumsRow`."""
        return {
            "delivered": self.delivered,
            "failed": self.failed,
            "pulled_bytes": self.pulled_bytes,
            "mean_s": self.elapsed_s / self.delivered if self.delivered else None,
            "p50_s": self.quantile(0.5),
            "p99_s": self.quantile(0.99),
            "last_code": self.last_code,
            "last_failed_at": round(self.last_failed_at, 3),
        }


class _SumsByKey(dict[tuple[str, ...], _Sums]):
    """Sums of the first `MAX_KEYS` keys, and under `(OTHERS, ...)` those of all others."""

    def of(self, key: tuple[str, ...]) -> _Sums:
        if (found := self.get(key)) is not None:
            return found
        if len(self) >= MAX_KEYS:
            key = (OTHERS,) * len(key)
        return self.setdefault(key, _Sums())


class _Slot:
    def __init__(self, number: int, since: float) -> None:
        self.number = number
        self.since = self.until = since  # of `clock`
        self.at = 0.0  # Unix time of `until`
        self.served_bytes = 0
        self.phases_s = dict.fromkeys(PHASES, 0.0)
        self.all, self.pairs, self.peers = _Sums(), _SumsByKey(), _SumsByKey()
        self.slowest: list[PullRecord] = []  # delivered ones, in no order

    def add_pull(self, record: PullRecord) -> None:
        for phase, elapsed_s in record.phases_s.items():
            self.phases_s[phase] += elapsed_s
        if record.outcome == "cancelled":
            return
        self.all.add(record)
        self.pairs.of((record.source, record.sink)).add(record)
        if record.peer:
            self.peers.of((record.peer,)).add(record)
        if record.outcome == "delivered":
            self.slowest.append(record)
            if len(self.slowest) > MAX_SLOWEST_A_SLOT:
                self.slowest.remove(min(self.slowest, key=lambda pull: pull.total_s))


def _node_row(slots: Sequence[_Slot]) -> dict[str, Any]:
    """Return the fields of a `NodeRow`."""
    total = _Sums.total([slot.all for slot in slots])
    served_bytes = sum(slot.served_bytes for slot in slots)
    return {**total.row(), "served_bytes": served_bytes, "failures": total.failures}


def _slot_row(slot: _Slot) -> SlotRow:
    phases_s = {phase: round(elapsed_s, 6) for phase, elapsed_s in slot.phases_s.items()}
    span_s = round(slot.until - slot.since, 3)
    return SlotRow(**_node_row([slot]), at=round(slot.at), span_s=span_s, phases_s=phases_s)


def _boot_time() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # it goes on while a machine is suspended


class Samples:
    """The slots of one node. Only on the loop's thread."""

    def __init__(
        self,
        clock: Callable[[], float] = _boot_time,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock  # seconds
        self._wall_clock = wall_clock
        self._started = now = clock()
        self._slots: deque[_Slot] = deque([_Slot(int(now // SLOT_S), now)])

    def tick(self) -> None:
        """Begin a slot if one is due: a few times a second, and before a report."""
        now = self._clock()
        number = int(now // SLOT_S)
        if number > self._slots[-1].number:
            self._slots.append(_Slot(number, float(number * SLOT_S)))
            while self._slots[0].number <= number - RING_S // SLOT_S:
                self._slots.popleft()
        slot = self._slots[-1]
        slot.until, slot.at = now, self._wall_clock()

    def add(self, record: Record) -> None:
        """Count a pull in the present slot."""
        if isinstance(record, PullRecord):
            self._slots[-1].add_pull(record)

    def add_served(self, num_bytes: int) -> None:
        """Count what another pull has read from this node."""
        slot = self._slots[-1]
        slot.served_bytes = min(slot.served_bytes + max(num_bytes, 0), _MAX_SUM)

    def last_minute(self) -> LastMinute:
        """Return rates and failures of the last 60 to 70 seconds."""
        self.tick()
        present = self._slots[-1]
        first = present.number - MINUTE_S // SLOT_S
        slots = [slot for slot in self._slots if slot.number >= first]
        row, seconds = _node_row(slots), present.until - max(self._started, first * SLOT_S)
        delivered, failed = row["delivered"], row["failed"]
        worst_code = next(iter(row["failures"]), "")
        peers = _totals([slot.peers for slot in slots]) if failed else []
        failed_from = {peer: sums.failures.get(worst_code, 0) for (peer,), sums in peers if peer != OTHERS}
        worst_peer = max(failed_from, key=lambda peer: failed_from[peer], default="")
        return LastMinute(
            **row,
            seconds=round(seconds, 1),
            failure_share=failed / (delivered + failed) if failed else 0.0,
            pulled_bytes_per_s=row["pulled_bytes"] / max(seconds, 1),
            served_bytes_per_s=row["served_bytes"] / max(seconds, 1),
            worst_code=worst_code,
            worst_peer=worst_peer if failed_from.get(worst_peer) else "",
        )

    def report(self) -> SampleReport:
        """Return the slots of the last `RING_S`."""
        self.tick()
        slots = self._slots
        by_number = {slot.number: _slot_row(slot) for slot in slots}
        return SampleReport(
            slots=[by_number.get(number) for number in range(slots[0].number, slots[-1].number + 1)],
            pairs=[
                PairRow(source=source, sink=sink, **sums.row())
                for (source, sink), sums in _totals([slot.pairs for slot in slots])
            ],
            peers=[
                PeerRow(peer=peer, **sums.row()) for (peer,), sums in _totals([slot.peers for slot in slots])
            ],
        )

    def slowest_pulls(self) -> list[PullRecord]:
        """Return the slowest delivered pulls of each slot, the slowest first."""
        self.tick()
        slowest = [pull for slot in self._slots for pull in slot.slowest]
        return sorted(slowest, key=lambda pull: -pull.total_s)


def _totals(tables: Sequence[_SumsByKey]) -> list[tuple[tuple[str, ...], _Sums]]:
    """Return the sum of each key: those that say most, `MAX_KEYS` at most, and one of all others."""

    def rank(item: tuple[tuple[str, ...], _Sums]) -> tuple[int, int]:
        return -item[1].failed, -item[1].pulled_bytes

    parts: defaultdict[tuple[str, ...], list[_Sums]] = defaultdict(list)
    for table in tables:
        for key, sums in table.items():
            parts[key].append(sums)
    found = sorted(((key, _Sums.total(of)) for key, of in parts.items()), key=rank)
    own = [(key, of) for key, of in found if OTHERS not in key]
    others = [(key, of) for key, of in found if OTHERS in key] + own[MAX_KEYS:]
    if others:
        key = (OTHERS,) * len(others[0][0])
        own[MAX_KEYS:] = [(key, _Sums.total([of for _, of in others]))]
    return sorted(own, key=rank)
