"""One sample a second of what a node does, for 15 minutes, in memory of a fixed size.

Records are added as they come and summed in plain integers; `finish_second` writes the sums into the ring
once a second. A second in which the loop was late, or the process stopped, has no sample: it is a gap, and
the sample after it is for all of these seconds. Pure: the caller reads the clocks.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvxferd.errors import Code
from kvxferd.records import PHASES, PullRecord, Record, ReleaseRecord
from kvxferd.telemetry.sample_report import OTHERS, Columns, LastMinute, PairRow, PeerRow, SampleReport

RING_S = 900
MINUTE_S = 60

# Four buckets for each doubling, 100 us to 210 s: a percentile is within a tenth of the truth. 86 buckets of
# 900 seconds are 310 kB.
BOUNDS_S = tuple(100e-6 * 2 ** (step / 4) for step in range(85))
# Of a table's row two for each doubling, of 16 bits: 44 buckets, 65 rows and 91 slots are 520 kB.
COARSE_BOUNDS_S = BOUNDS_S[::2]
_MAX_COUNT = (1 << 16) - 1

# A table counts in slots of ten seconds, and has this many rows, and one for what finds none.
SLOT_S = 10
NUM_SLOTS = RING_S // SLOT_S + 1
MAX_KEYS = 64

# 900 of them fit in 63 bits.
_MAX_SUM = 1 << 52

_COUNTS = (
    *("span_s", "delivered", "failed", "cancelled", "pulled_bytes", "served_bytes", "served_transfers"),
    *("expired_leases", "running_pulls", "warnings"),
)  # fmt: skip

Ints = npt.NDArray[np.int64]
Counts = npt.NDArray[np.uint32]


class Gauges(NamedTuple):
    """What is read once a second, not counted."""

    running_pulls: int = 0
    oldest_pull_s: float = 0.0
    warnings: int = 0


class Samples:
    """The samples of one node. Only on the loop's thread."""

    def __init__(self) -> None:
        self._first = -1  # number of the second before the first sample; -1: not started
        self._last = -1  # number of the last sample
        self._numbers = np.full(RING_S, -1, np.int64)  # which second each row is of
        self._at = np.zeros(RING_S, np.float64)
        self._counts = np.zeros((RING_S, len(_COUNTS)), np.int64)
        self._oldest_s = np.zeros(RING_S, np.float64)
        self._times = np.zeros((RING_S, len(BOUNDS_S) + 1), np.uint32)
        self._phases_s = np.zeros((RING_S, len(PHASES)), np.float64)
        self._failures: dict[str, Counts] = {}  # by code: at most as many as there are codes
        self._pairs = _SlotSums(len(COARSE_BOUNDS_S) + 1)
        self._peers = _SlotSums()
        self._start_second()

    def start(self, now: float) -> None:
        """Begin: what was before is not in the first sample's second. `now`: as of `finish_second`."""
        self._first = self._last = round(now)
        self._pairs.advance(self._last // SLOT_S)
        self._peers.advance(self._last // SLOT_S)

    # --- in

    def add(self, record: Record) -> None:
        """Count a record in the second that is not over."""
        match record:
            case PullRecord():
                self._add_pull(record)
            case ReleaseRecord(why=Code.LEASE_EXPIRED):
                self._sums["expired_leases"] += 1

    def add_served(self, num_bytes: int) -> None:
        """Count a transfer that another pull has read from this node."""
        self._sums["served_bytes"] += _clamp(num_bytes)
        self._sums["served_transfers"] += 1

    def finish_second(self, now: float, wall: float, gauges: Gauges) -> None:
        """Write what was counted since the last sample into the ring.

        `now`: seconds of a clock that goes on while the machine is suspended (CLOCK_BOOTTIME). `wall`: unix
        time. A call before the next whole second is due does nothing.
        """
        number = round(now)
        if self._first < 0:
            self.start(now - 1)
        if number <= self._last:
            return
        self._write(number, wall, gauges)
        self._last = number
        for table in (self._pairs, self._peers):
            table.advance((number - 1) // SLOT_S)
            table.flush(wall)
        self._start_second()

    def _start_second(self) -> None:
        self._sums: dict[str, int] = dict.fromkeys(_COUNTS, 0)
        self._second_times: Counter[int] = Counter()
        self._second_phases_s = dict.fromkeys(PHASES, 0.0)
        self._second_failures: Counter[str] = Counter()

    def _add_pull(self, record: PullRecord) -> None:
        for phase, elapsed_s in record.phases_s.items():
            if phase in self._second_phases_s:
                self._second_phases_s[phase] += _clamp_s(elapsed_s)
        if record.outcome == "cancelled":
            self._sums["cancelled"] += 1
            return
        code = ""
        if record.outcome == "delivered":
            self._sums["delivered"] += 1
            self._sums["pulled_bytes"] += _clamp(record.bytes)
            self._second_times[bisect_left(BOUNDS_S, record.total_s)] += 1
        else:
            code = record.code.value if record.code is not None else Code.INTERNAL.value
            self._sums["failed"] += 1
            self._second_failures[code] += 1
        self._pairs.add((record.source, record.sink), record, code)
        if record.peer:
            self._peers.add(record.peer, record, code)

    def _write(self, number: int, wall: float, gauges: Gauges) -> None:
        row = number % RING_S
        self._sums |= {
            "span_s": min(number - self._last, RING_S),
            "running_pulls": gauges.running_pulls,
            "warnings": gauges.warnings,
        }
        self._numbers[row] = number
        self._at[row] = wall
        self._oldest_s[row] = gauges.oldest_pull_s
        self._counts[row] = [min(value, _MAX_SUM) for value in self._sums.values()]
        self._times[row] = 0
        for bucket, count in self._second_times.items():
            self._times[row, bucket] = count
        self._phases_s[row] = list(self._second_phases_s.values())
        for code in self._second_failures.keys() - self._failures.keys():
            self._failures[code] = np.zeros(RING_S, np.uint32)
        for code, failures in self._failures.items():
            failures[row] = self._second_failures[code]

    # --- out

    def last_minute(self) -> LastMinute:
        """Return rates and failures of the last 60 seconds. Takes about 0.1 ms."""
        rows = self._rows(MINUTE_S)
        sums = {name: _total(self._counts[rows, index]) for index, name in enumerate(_COUNTS)}
        failures = Counter({code: _total(of[rows]) for code, of in self._failures.items()})
        by_code = {code: count for code, count in failures.most_common() if count}
        worst_code = next(iter(by_code), "")
        now = dict(zip(_COUNTS, self._counts[self._last % RING_S].tolist(), strict=True))
        seconds = min(self._last - self._first, MINUTE_S)
        times = self._times[rows].sum(axis=0, dtype=np.int64)[None]
        delivered, failed = sums["delivered"], sums["failed"]
        return LastMinute(
            seconds=float(seconds),
            delivered=delivered,
            failed=failed,
            cancelled=sums["cancelled"],
            failure_share=failed / (delivered + failed) if failed else 0.0,
            pulled_bytes=sums["pulled_bytes"],
            pulled_bytes_per_s=sums["pulled_bytes"] / max(seconds, 1),
            served_bytes=sums["served_bytes"],
            served_bytes_per_s=sums["served_bytes"] / max(seconds, 1),
            served_transfers=sums["served_transfers"],
            p50_s=percentiles(times, BOUNDS_S, 0.5)[0],
            p99_s=percentiles(times, BOUNDS_S, 0.99)[0],
            failures=by_code,
            worst_code=worst_code,
            worst_peer=self._worst_peer(worst_code) if failed else "",
            expired_leases=sums["expired_leases"],
            running_pulls=now["running_pulls"],
            oldest_pull_s=float(self._oldest_s[self._last % RING_S]),
            warnings=now["warnings"],
        )

    def report(self, seconds: int) -> SampleReport:
        """Return the last seconds, at most `RING_S`."""
        seconds = max(0, min(seconds, RING_S, self._last - self._first))
        numbers = np.arange(self._last - seconds + 1, self._last + 1)
        rows = numbers % RING_S
        is_gap = self._numbers[rows] != numbers

        def column(values: npt.NDArray[Any]) -> list[Any]:
            found: list[Any] = values[rows].tolist()
            for index in gaps:
                found[index] = None
            return found

        gaps = np.flatnonzero(is_gap).tolist()
        times = np.where(is_gap[:, None], 0, self._times[rows])
        columns = Columns(
            at=list(self._times_of_day(numbers, is_gap)),
            oldest_pull_s=column(self._oldest_s.round(6)),
            p50_s=percentiles(times, BOUNDS_S, 0.5),
            p99_s=percentiles(times, BOUNDS_S, 0.99),
            **{name: column(self._counts[:, index]) for index, name in enumerate(_COUNTS)},
        )
        return SampleReport(
            seconds=seconds,
            columns=columns,
            failures={
                code: column(of) for code, of in sorted(self._failures.items()) if of[rows[~is_gap]].any()
            },
            phases_s={phase: column(self._phases_s[:, index].round(6)) for index, phase in enumerate(PHASES)},
            last_minute=self.last_minute(),
            pairs=[_pair_row(row) for row in self._pairs.rows(seconds)],
            peers=[_peer_row(row) for row in self._peers.rows(seconds)],
        )

    def _worst_peer(self, code: str) -> str:
        """Return the peer with most failures of those whose last one had this code, or the only one."""
        failed = [_peer_row(row) for row in self._peers.rows(MINUTE_S) if row.failed]
        only = failed[0].peer if len(failed) == 1 else ""
        known = next((row.peer for row in failed if row.last_code == code), only)
        return "" if known == OTHERS else known

    def _rows(self, seconds: int) -> Ints:
        """Return the ring's rows of the last seconds that have a sample."""
        seconds = max(0, min(seconds, self._last - self._first))
        numbers = np.arange(self._last - seconds + 1, self._last + 1)
        rows = numbers % RING_S
        found: Ints = rows[self._numbers[rows] == numbers]
        return found

    def _times_of_day(self, numbers: Ints, is_gap: npt.NDArray[np.bool_]) -> Iterator[int]:
        """Yield the unix time of each second; of a gap as the last sample's clock counts back."""
        latest = float(self._at[self._last % RING_S])
        for number, gap in zip(numbers.tolist(), is_gap.tolist(), strict=True):
            yield round(latest - (self._last - number) if gap else float(self._at[number % RING_S]))


class _SlotSums:
    """Sums for each of a few keys, in slots of `SLOT_S`. A key without a row counts in the last row."""

    def __init__(self, num_buckets: int = 0) -> None:
        shape = (MAX_KEYS + 1, NUM_SLOTS)
        self._rows: dict[Hashable, int] = {}
        self._delivered = np.zeros(shape, np.int64)
        self._failed = np.zeros(shape, np.int64)
        self._bytes = np.zeros(shape, np.int64)
        self._elapsed_s = np.zeros(shape, np.float64)
        self._times = np.zeros((*shape, num_buckets), np.uint16)
        self._last_failures: dict[int, tuple[str, float]] = {}
        self._pending: dict[int, _PendingPulls] = {}  # rows of the second that is not over
        self._slot = 0
        self._full_slot = -1  # the slot in which no row was free

    def advance(self, slot: int) -> None:
        """Begin that slot. Those between it and the present one are empty."""
        for number in range(max(self._slot + 1, slot - NUM_SLOTS + 1), slot + 1):
            for values in (self._delivered, self._failed, self._bytes, self._elapsed_s, self._times):
                values[:, number % NUM_SLOTS] = 0
        self._slot = max(slot, self._slot)

    def add(self, key: Hashable, record: PullRecord, code: str) -> None:
        """Count a pull that was delivered (`code` is ""), or failed."""
        row = self._row_of(key)
        pending = self._pending.get(row)
        if pending is None:
            pending = self._pending[row] = _PendingPulls()
        if code:
            pending.failed += 1
            pending.code = code
            return
        pending.delivered += 1
        pending.num_bytes += _clamp(record.bytes)
        pending.elapsed_s += record.total_s
        pending.times[bisect_left(COARSE_BOUNDS_S, record.total_s)] += 1

    def flush(self, wall: float) -> None:
        """Write what was counted since the last call, until that unix time, into the present slot."""
        slot = self._slot % NUM_SLOTS
        for row, pending in self._pending.items():
            self._delivered[row, slot] += pending.delivered
            self._failed[row, slot] += pending.failed
            self._bytes[row, slot] += min(pending.num_bytes, _MAX_SUM)
            self._elapsed_s[row, slot] += pending.elapsed_s
            if pending.code:
                self._last_failures[row] = (pending.code, wall)
            if self._times.shape[2]:
                times = self._times[row, slot] + np.array(pending.times, np.int64)
                self._times[row, slot] = np.minimum(times, _MAX_COUNT)
        self._pending.clear()

    def rows(self, seconds: int) -> list[_TableRow]:
        """Return the rows with a pull in the slots of the last seconds: most failures first, then bytes."""
        slots = self._slots(seconds)
        keys = {row: key for key, row in self._rows.items()}
        found = []
        for row in (*keys, MAX_KEYS):
            delivered, failed = _total(self._delivered[row, slots]), _total(self._failed[row, slots])
            if not delivered + failed:
                continue
            times = self._times[row, slots].sum(axis=0, dtype=np.int64)[None]
            code, wall = self._last_failures.get(row, ("", 0.0)) if failed else ("", 0.0)
            found.append(
                _TableRow(
                    key=keys.get(row),
                    delivered=delivered,
                    failed=failed,
                    pulled_bytes=_total(self._bytes[row, slots]),
                    mean_s=float(self._elapsed_s[row, slots].sum()) / delivered if delivered else None,
                    p50_s=percentiles(times, COARSE_BOUNDS_S, 0.5)[0],
                    p99_s=percentiles(times, COARSE_BOUNDS_S, 0.99)[0],
                    last_code=code,
                    last_failed_at=round(wall, 3),
                )
            )
        return sorted(found, key=lambda row: (-row.failed, -row.pulled_bytes))

    def _slots(self, seconds: int) -> list[int]:
        first = self._slot - min(-(-seconds // SLOT_S), NUM_SLOTS - 1)
        return [number % NUM_SLOTS for number in range(first, self._slot + 1)]

    def _row_of(self, key: Hashable) -> int:
        row = self._rows.get(key)
        if row is None:
            row = self._free_row()
            if row != MAX_KEYS:
                self._rows[key] = row
        return row

    def _free_row(self) -> int:
        """Return a row that no key has, or whose key had no pull for 15 minutes; `MAX_KEYS`: none."""
        if len(self._rows) < MAX_KEYS:
            return len(self._rows)
        if self._full_slot == self._slot:
            return MAX_KEYS  # looked at in this slot already: a flood of names costs nothing
        used = (self._delivered + self._failed).sum(axis=1)
        for key, row in self._rows.items():
            if not used[row] and row not in self._pending:
                del self._rows[key]
                self._last_failures.pop(row, None)
                return row
        self._full_slot = self._slot
        return MAX_KEYS


@dataclass(slots=True)
class _PendingPulls:
    """A row's pulls of the second that is not over."""

    delivered: int = 0
    failed: int = 0
    num_bytes: int = 0
    elapsed_s: float = 0.0
    code: str = ""
    times: list[int] = field(default_factory=lambda: [0] * (len(COARSE_BOUNDS_S) + 1))


class _TableRow(NamedTuple):
    key: Any  # None: of all keys that have no row
    delivered: int
    failed: int
    pulled_bytes: int
    mean_s: float | None
    p50_s: float | None
    p99_s: float | None
    last_code: str
    last_failed_at: float


def _pair_row(row: _TableRow) -> PairRow:
    source, sink = row.key or (OTHERS, OTHERS)
    return PairRow(
        source=source,
        sink=sink,
        delivered=row.delivered,
        failed=row.failed,
        pulled_bytes=row.pulled_bytes,
        mean_s=row.mean_s,
        p50_s=row.p50_s,
        p99_s=row.p99_s,
        last_code=row.last_code,
        last_failed_at=row.last_failed_at,
    )


def _peer_row(row: _TableRow) -> PeerRow:
    return PeerRow(
        peer=OTHERS if row.key is None else row.key,
        delivered=row.delivered,
        failed=row.failed,
        pulled_bytes=row.pulled_bytes,
        last_code=row.last_code,
        last_failed_at=row.last_failed_at,
    )


def percentiles(counts: Ints | Counts, bounds_s: Sequence[float], share: float) -> list[float | None]:
    """Return for each row the time that `share` of the counted do not exceed; None without any.

    counts: (n, one more than the bounds), the last column for longer times, which count as the last bound.
    Within a bucket times are taken as evenly spread.
    """
    if not counts.shape[1]:
        return [None] * len(counts)
    sums = np.cumsum(counts, axis=1, dtype=np.int64)
    ranks = share * sums[:, -1]
    buckets = (sums < ranks[:, None]).sum(axis=1)
    edges = np.array([0.0, *bounds_s, bounds_s[-1]])
    rows = np.arange(len(counts))
    before = np.where(buckets > 0, sums[rows, buckets - 1], 0)
    parts = (ranks - before) / np.maximum(counts[rows, buckets], 1)
    found = edges[buckets] + parts * (edges[buckets + 1] - edges[buckets])
    return [
        float(f"{value:.3g}") if num else None
        for value, num in zip(found.tolist(), sums[:, -1].tolist(), strict=True)
    ]


def _total(values: npt.NDArray[Any]) -> int:
    # As Python's integers: sums of what a mover reported may pass 64 bits.
    return sum(values.tolist())


def _clamp_s(elapsed_s: float) -> float:
    # A resident mover's word: no number, infinity and negative ones are 0. An hour is beyond any deadline.
    return min(elapsed_s, 3600.0) if 0.0 < elapsed_s < math.inf else 0.0


def _clamp(num_bytes: int) -> int:
    # A resident mover's word may be any number.
    return min(max(num_bytes, 0), _MAX_SUM)
