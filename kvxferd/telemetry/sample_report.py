"""The last minutes of a node in numbers: structs of `/v1/samples` and the command line."""

from __future__ import annotations

import msgspec

# Rows of a table for what is not in one of its own: see `samples.MAX_KEYS`.
OTHERS = "(others)"


class LastMinute(msgspec.Struct, frozen=True, kw_only=True):
    """What a node did in its last 60 seconds, or since it serves."""

    seconds: float  # how long that was: less than 60 in the first minute
    delivered: int  # pulls
    failed: int
    cancelled: int
    failure_share: float  # failed / (delivered + failed), 0 to 1
    pulled_bytes: int
    pulled_bytes_per_s: float
    served_bytes: int  # that other pulls read from this node, counted when they acknowledge
    served_bytes_per_s: float
    served_transfers: int
    p50_s: float | None  # of delivered pulls, arrival to delivery, within a tenth; None without one
    p99_s: float | None
    failures: dict[str, int]  # failed pulls by code, the commonest first
    worst_code: str  # the commonest code of a failed pull; "" without one
    worst_peer: str  # of the peers whose last failure had it, the one with most; "" if not known
    expired_leases: int
    running_pulls: int  # now
    oldest_pull_s: float  # age of the oldest of those, 0 without one
    warnings: int  # now


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """One value for each second, oldest first. None: the daemon took no sample in that second."""

    at: list[int]  # unix time
    span_s: list[int | None]  # how many seconds a sample is for: more than 1 after a gap
    delivered: list[int | None]
    failed: list[int | None]
    cancelled: list[int | None]
    pulled_bytes: list[int | None]
    served_bytes: list[int | None]
    served_transfers: list[int | None]
    expired_leases: list[int | None]
    p50_s: list[float | None]  # None without a delivered pull, too
    p99_s: list[float | None]
    running_pulls: list[int | None]
    oldest_pull_s: list[float | None]
    warnings: list[int | None]


class PairRow(msgspec.Struct, frozen=True, kw_only=True):
    """The pulls of one local engine from one other."""

    source: str  # `OTHERS` for the sum of all pairs that have no row
    sink: str
    delivered: int
    failed: int
    pulled_bytes: int
    mean_s: float | None  # of delivered pulls
    p50_s: float | None  # within two fifths
    p99_s: float | None
    last_code: str  # of the last failed pull
    last_failed_at: float  # unix time; 0: none


class PeerRow(msgspec.Struct, frozen=True, kw_only=True):
    """The pulls from one daemon."""

    peer: str  # `OTHERS` for the sum of all that have no row
    delivered: int = 0
    failed: int = 0
    pulled_bytes: int = 0
    last_code: str = ""
    last_failed_at: float = 0.0


class SampleReport(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of `/v1/samples`, which adds to each peer what else is known of it, and notable records."""

    seconds: int  # rows of each column
    columns: Columns
    failures: dict[str, list[int | None]]  # failed pulls by code
    phases_s: dict[str, list[float | None]]  # seconds that pulls which ended spent in each phase
    last_minute: LastMinute
    # Of the same seconds, and up to ten more. Most failures first, then most bytes.
    pairs: list[PairRow]
    peers: list[PeerRow]
