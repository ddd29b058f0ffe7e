"""First pulls that wait for a handshake or a connection, which `prepare` would have made before.

Pure: the caller gives the records and the clock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import NamedTuple

from kvxferd.core.snapshot import PullRecord
from kvxferd.ids import EngineId, Rank
from kvxferd.telemetry.warnings.kinds import WarningKind
from kvxferd.telemetry.warnings.warning_list import Finding

# A wait that a user notices, and that is more than the machine's noise.
MIN_WAIT_S = 0.25
# The next pulls show what one of the pair usually takes.
NUM_NEXT = 4
SLOW_FACTOR = 4.0
# Pairs of a source and a sink's rank: 1,024 are 300 kB. A pair that was forgotten is new again.
MAX_PAIRS = 1_024
MAX_FOUND = 64
SHOWN_FOR_S = 600.0

_Pair = tuple[EngineId, EngineId, Rank]


class _First:
    __slots__ = ("handshake_s", "next_s_per_byte", "num_bytes", "total_s", "wire_s")

    def __init__(self, record: PullRecord) -> None:
        self.total_s = record.total_s
        self.handshake_s = record.phases_s.get("handshake", 0.0)
        self.wire_s = record.phases_s.get("wire", 0.0)
        self.num_bytes = record.bytes
        self.next_s_per_byte: list[float] = []


class _Found(NamedTuple):
    at: float
    pair: _Pair
    wait_s: float
    handshake_s: float


class SlowFirstPulls:
    """The first pull of each pair, until some more of the pair show what was unusual about it."""

    def __init__(self) -> None:
        self._firsts: OrderedDict[_Pair, _First | None] = OrderedDict()  # None: judged
        self._found: deque[_Found] = deque(maxlen=MAX_FOUND)

    def record(self, record: PullRecord, now: float) -> None:
        """Take over a delivered pull."""
        if record.outcome != "delivered" or not record.bytes:
            return
        pair = (record.source, record.sink, record.rank)
        if pair not in self._firsts:
            if len(self._firsts) >= MAX_PAIRS:
                self._firsts.popitem(last=False)
            self._firsts[pair] = _First(record)
            return
        self._firsts.move_to_end(pair)
        first = self._firsts[pair]
        if first is None:
            return
        first.next_s_per_byte.append(record.phases_s.get("wire", 0.0) / record.bytes)
        if len(first.next_s_per_byte) >= NUM_NEXT:
            self._firsts[pair] = None
            self._judge(pair, first, now)

    def findings(self, now: float) -> list[Finding]:
        """Return one finding for all pairs that were found in the last minutes."""
        while self._found and now - self._found[0].at > SHOWN_FOR_S:
            self._found.popleft()
        if not self._found:
            return []
        longest = max(self._found, key=lambda found: found.wait_s)
        source, sink, rank = longest.pair
        why = "the handshake" if 2 * longest.handshake_s > longest.wait_s else "a connection"
        some = "a first pull" if len(self._found) == 1 else f"{len(self._found)} first pulls"
        message = (
            f"{some} of a pair of engines waited, up to {longest.wait_s:.2f} s for {why} (from {source} to "
            f"{sink} {rank})"
        )
        remedy = "let the reading engine call `prepare` as soon as it has the reference"
        return [Finding(WarningKind.SLOW_FIRST_PULL, "", message, remedy)]

    def _judge(self, pair: _Pair, first: _First, now: float) -> None:
        usual_s = first.num_bytes * sorted(first.next_s_per_byte)[NUM_NEXT // 2]
        # What the wire took far beyond the usual time of as many bytes is the time of a connection.
        wire_wait_s = first.wire_s - usual_s if first.wire_s > SLOW_FACTOR * usual_s else 0.0
        wait_s = min(first.total_s, first.handshake_s + wire_wait_s)
        if wait_s >= MIN_WAIT_S:
            self._found.append(_Found(now, pair, wait_s, first.handshake_s))
