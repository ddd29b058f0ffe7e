"""The last records of this node, for `/v1/history`: bounded in number and bytes, and searched here."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvxferd.errors import Code
from kvxferd.records import (
    HandshakeRecord,
    PullRecord,
    Record,
    ReleaseRecord,
    kind_of,
)
from kvxferd.telemetry.recent_entries import RecentEntries

# A record is about 1 KiB, so this is 1 MiB: two seconds of a node with 500 pulls a second, hours of others.
MAX_RECORDS = 1024
# Of a busy node's older records, those that somebody looks for: what failed, and what took long.
MAX_KEPT = 512
SLOW_S = 1.0
# Names have up to 256 characters and messages 2,000: longer records are fewer.
MAX_BYTES = 2 << 20
OVERHEAD_BYTES = 512  # of a record's objects, beside its content
# One response's: 1.5 ms of the loop.
MAX_PAGE = 512
DEFAULT_PAGE = 256
# All kinds together have 47. They are split for each record: 8,000 commas took 150 ms of the loop.
MAXKINDS_CHARS = 64

_encoder = msgspec.msgpack.Encoder()

# Releases that no engine wanted.
_FAILED_RELEASES = frozenset({Code.LEASE_EXPIRED, Code.PUBLISHER_GONE, Code.RANK_LOST})


class HistoryQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which records are wanted. Each filter that is set must hold."""

    failed: bool = False  # pulls and handshakes that failed, and releases that no engine wanted
    slower: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # pulls and handshakes that took at least so many s
    transfer: str = ""  # its pulls and its release
    engine: str = ""  # an engine's id, on either side
    kind: Annotated[str, msgspec.Meta(max_length=MAXKINDS_CHARS)] = ""  # separated by commas; "": all
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE)] = DEFAULT_PAGE

    def matches(self, record: Record) -> bool:
        """Whether the record passes every filter."""
        if self.kind and kind_of(record) not in self.kind.split(","):
            return False
        if self.transfer and self.transfer != getattr(record, "transfer_id", None):
            return False
        if self.engine and self.engine not in _engines_of(record):
            return False
        if self.failed and not has_failed(record):
            return False
        return not self.slower or (duration_of(record) or 0.0) >= self.slower


class History:
    """The last records. Once full, each new one drops the oldest; what failed or was slow stays longer."""

    def __init__(self, max_records: int = MAX_RECORDS, max_bytes: int = MAX_BYTES) -> None:
        self._entries = RecentEntries[Record](max_records, max_bytes, MAX_KEPT, max_bytes // 2)

    def add(self, record: Record) -> None:
        """Append a record."""
        is_kept = has_failed(record) or (duration_of(record) or 0.0) >= SLOW_S
        self._entries.add(record, OVERHEAD_BYTES + len(_encoder.encode(record)), is_kept)

    def records(self) -> list[Record]:
        """Return the records, oldest first."""
        return [entry.item for entry in self._entries.all()]

    def failed_pulls(self) -> list[PullRecord]:
        """Return the failed pulls, the latest first. Those that were cancelled are none."""
        found = (record for record in self.records() if isinstance(record, PullRecord))
        return [record for record in found if record.has_failed][::-1]

    def expired_leases(self) -> list[ReleaseRecord]:
        """Return the transfers whose lease expired, the latest first."""
        found = (record for record in self.records() if isinstance(record, ReleaseRecord))
        return [record for record in found if record.why is Code.LEASE_EXPIRED][::-1]

    def search(self, query: HistoryQuery) -> list[Record]:
        """Return the last records that the query finds, oldest first."""
        return [record for record in self.records() if query.matches(record)][-query.limit :]


def has_failed(record: Record) -> bool:
    """Whether it is of a pull or a handshake that failed, or a release that no engine wanted."""
    match record:
        case PullRecord():
            return record.has_failed
        case HandshakeRecord():
            return record.outcome != "ok"
        case ReleaseRecord():
            return record.why in _FAILED_RELEASES
        case _:
            return False


def duration_of(record: Record) -> float | None:
    """Return how long the pull or the handshake took, in seconds; None for other kinds."""
    match record:
        case PullRecord():
            return record.total_s
        case HandshakeRecord():
            return record.elapsed_s
        case _:
            return None


def _engines_of(record: Record) -> tuple[str, ...]:
    match record:
        case PullRecord():
            return (record.source, record.sink)
        case ReleaseRecord():
            return (record.engine_id, *(reader.engine_id for reader in record.readers))
        case _:
            return (record.engine_id,)


def stamped(record: Record, ended_at: float) -> Record:
    """Return the record with its times of day, in Unix seconds."""
    took_s = record.held_s if isinstance(record, ReleaseRecord) else duration_of(record)
    if took_s is None:
        return msgspec.structs.replace(record, ended_at=ended_at)
    return msgspec.structs.replace(record, ended_at=ended_at, started_at=ended_at - took_s)


def record_from_json(value: dict[str, Any]) -> Record:
    """Return the record of its JSON. Raises msgspec.ValidationError."""
    found: Record = msgspec.convert(value, Record)
    return found
