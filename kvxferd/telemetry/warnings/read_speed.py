"""Reads that are far slower than those from other peers, than before, or than predicted.

Pulls overlap, and each of several at a time takes longer. A peer's reads are therefore slow only if two
numbers are low: the speed of a typical pull, and the bytes of all pulls over the time in which at least one
was on the wire. More pulls at a time lower the first alone, fewer lower the second alone.

Pure: the caller gives the records and the clock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

from kvxferd.core.snapshot import PullRecord
from kvxferd.ids import Endpoint
from kvxferd.telemetry.warnings.kinds import WarningKind
from kvxferd.telemetry.warnings.warning_list import Finding

# A small pull is the time of a round trip, not of its bytes; so is one of short runs, that of their number.
MIN_BYTES = 1 << 20
MIN_RUN_BYTES = 32 << 10
# Of one peer: as many pulls are looked at, if there are MIN_SAMPLES of the last RECENT_S.
NUM_SAMPLES = 32
MIN_SAMPLES = 16
RECENT_S = 300.0
# Full windows of NUM_SAMPLES, before a peer has a past, and kept of it.
MIN_PAST = 4
MAX_PAST = 64
# Peers with recent samples, before another is compared with them.
MIN_OTHERS = 2
# 64 peers of 32 samples and 64 speeds are 400 kB; the longest unused is forgotten.
MAX_PEERS = 64
# A warning begins below a quarter, and ends above a half. Two healthy links differ by less than two.
SLOW_FACTOR = 4.0
CLEAR_FACTOR = 2.0
# What stays slow for this long is how it is now.
ADOPT_S = 3600.0

# A prediction of less than this is mostly the fixed time of a read.
MIN_PREDICTED_S = 2e-3
MISPREDICTED_FACTOR = 4.0
PREDICTED_CLEAR_FACTOR = 2.5


class _Sample(NamedTuple):
    at: float  # when it was recorded, for its age
    ended: float  # Unix time
    wire_s: float
    num_bytes: int
    predicted_s: float


class Speed(NamedTuple):
    """The speed of a window of pulls, in bytes per second."""

    typical: float  # of three quarters of the pulls, each alone
    overall: float  # of all together, over the time in which one was on the wire

    def is_below(self, other: Speed, factor: float) -> bool:
        """Whether both numbers are below the other's by that factor."""
        return self.typical * factor < other.typical and self.overall * factor < other.overall


class _Peer:
    """The last pulls from one peer, and the speeds of earlier windows."""

    def __init__(self) -> None:
        self.samples: deque[_Sample] = deque(maxlen=NUM_SAMPLES)
        self.past: deque[Speed] = deque(maxlen=MAX_PAST)
        self.slow_since: float | None = None
        self._num_since_window = 0
        self._speed: Speed | None = None  # None: a sample came, or there are too few

    def add(self, sample: _Sample) -> None:
        self.samples.append(sample)
        self._speed = None
        self._num_since_window += 1

    def speed(self, now: float) -> Speed | None:
        """Return the present speed; None: too few recent samples."""
        while self.samples and now - self.samples[0].at > RECENT_S:
            self.samples.popleft()
            self._speed = None
        if len(self.samples) < MIN_SAMPLES:
            return None
        if self._speed is None:
            self._speed = speed_of(self.samples)
        return self._speed

    def keep_window(self, speed: Speed) -> None:
        """Make a full window part of the past."""
        if self._num_since_window >= NUM_SAMPLES:
            self._num_since_window = 0
            self.past.append(speed)

    def usual_speed(self) -> Speed | None:
        if len(self.past) < MIN_PAST:
            return None
        return Speed(median(s.typical for s in self.past), median(s.overall for s in self.past))


class SlowPeers:
    """The read speed of each peer."""

    def __init__(self, own_endpoint: Endpoint) -> None:
        """A node's reads from itself are copies in memory: they are compared with their own past alone."""
        self._own_endpoint = own_endpoint
        self._peers: OrderedDict[Endpoint, _Peer] = OrderedDict()

    def record(self, record: PullRecord, now: float) -> None:
        """Take over a pull, if its time is that of its bytes."""
        if not record.peer or not _is_bound_by_bytes(record):
            return
        if record.peer not in self._peers and len(self._peers) >= MAX_PEERS:
            self._peers.popitem(last=False)
        peer = self._peers.setdefault(record.peer, _Peer())
        self._peers.move_to_end(record.peer)
        peer.add(_sample_of(record, now))

    def findings(self, now: float) -> list[Finding]:
        """Return one finding for each slow peer."""
        measured = ((endpoint, peer.speed(now)) for endpoint, peer in self._peers.items())
        speeds = {endpoint: speed for endpoint, speed in measured if speed is not None}
        found = []
        for endpoint, speed in speeds.items():
            others = [s for other, s in speeds.items() if other not in (endpoint, self._own_endpoint)]
            reason = self._reason(endpoint, speed, others, now)
            if reason:
                found.append(_slow_peer(endpoint, speed, reason))
        for endpoint in self._peers.keys() - speeds.keys():
            self._peers[endpoint].slow_since = None
        return found

    def _reason(self, endpoint: Endpoint, speed: Speed, others: list[Speed], now: float) -> str:
        """Return in comparison with what the peer is slow; "" if it is not."""
        peer = self._peers[endpoint]
        if peer.slow_since is not None and now - peer.slow_since > ADOPT_S:
            peer.past.clear()
        factor = CLEAR_FACTOR if peer.slow_since is not None else SLOW_FACTOR
        usual = peer.usual_speed()
        reason = ""
        if usual is not None and speed.is_below(usual, factor):
            reason = f"from it they were {_rate(usual.overall)} before"
        elif endpoint != self._own_endpoint and len(others) >= MIN_OTHERS:
            of_others = Speed(median(s.typical for s in others), median(s.overall for s in others))
            if speed.is_below(of_others, factor):
                reason = f"from other peers they are {_rate(of_others.overall)}"
        if not reason:
            peer.slow_since = None
            peer.keep_window(speed)
        elif peer.slow_since is None:
            peer.slow_since = now
        return reason


class MispredictedReads:
    """Whether the node's reads take far longer than the movers predict.

    Shorter is no warning: several movers read at a time, and each predicts for itself.
    """

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=2 * NUM_SAMPLES)
        self._is_warning = False

    def record(self, record: PullRecord, now: float) -> None:
        """Take over a pull that had a prediction."""
        if record.outcome == "delivered" and record.predicted_s >= MIN_PREDICTED_S:
            self._samples.append(_sample_of(record, now))

    def findings(self, now: float) -> list[Finding]:
        """Return the one finding, while reads take too long."""
        while self._samples and now - self._samples[0].at > RECENT_S:
            self._samples.popleft()
        if len(self._samples) < NUM_SAMPLES:
            self._is_warning = False
            return []
        typical = median(sample.wire_s / sample.predicted_s for sample in self._samples)
        predicted_s = sum(sample.predicted_s for sample in self._samples)
        overall = wire_time(self._samples) / predicted_s
        factor = PREDICTED_CLEAR_FACTOR if self._is_warning else MISPREDICTED_FACTOR
        self._is_warning = min(typical, overall) > factor
        if not self._is_warning:
            return []
        message = (
            f"reads take {min(typical, overall):.1f} times as long as predicted, over the last "
            f"{len(self._samples)} pulls: the way in which they read may be the slower one"
        )
        remedy = "look at `kvxferd transfers`; if it stays, compare mover.read's values by `kvxferd bench`"
        return [Finding(WarningKind.READS_MISPREDICTED, "", message, remedy)]


def speed_of(samples: Iterable[_Sample]) -> Speed:
    """Return the speed of these pulls; at least one."""
    samples = list(samples)
    by_speed = sorted(sample.num_bytes / sample.wire_s for sample in samples)
    total = sum(sample.num_bytes for sample in samples)
    return Speed(by_speed[3 * len(by_speed) // 4], total / wire_time(samples))


def wire_time(samples: Iterable[_Sample]) -> float:
    """Return for how long at least one of the pulls was on the wire."""
    total_s, reached = 0.0, float("-inf")
    for began, ended in sorted((sample.ended - sample.wire_s, sample.ended) for sample in samples):
        total_s += max(0.0, ended - max(began, reached))
        reached = max(reached, ended)
    # Two pulls of one instant: clocks have steps.
    return max(total_s, 1e-9)


def _is_bound_by_bytes(record: PullRecord) -> bool:
    if record.outcome != "delivered" or record.bytes < MIN_BYTES or record.phases_s.get("wire", 0.0) <= 0.0:
        return False
    direct = record.ways.get("direct", record.bytes)
    return 2 * direct < record.bytes or record.bytes >= MIN_RUN_BYTES * record.runs


def _sample_of(record: PullRecord, now: float) -> _Sample:
    wire_s = max(record.phases_s.get("wire", 0.0), 1e-9)
    return _Sample(now, record.ended_at or now, wire_s, record.bytes, record.predicted_s)


def _slow_peer(endpoint: Endpoint, speed: Speed, reason: str) -> Finding:
    message = f"reads from {endpoint} are slow: {_rate(speed.overall)}, and {reason}"
    remedy = (
        "look at that node's card, cable, switch port and processors, and at `lanes` in `kvxferd engines` on "
        "both nodes"
    )
    return Finding(WarningKind.SLOW_PEER, endpoint, message, remedy)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"
