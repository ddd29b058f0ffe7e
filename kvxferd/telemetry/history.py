"""The last records of this node, for `/v1/history`: bounded in number and bytes, and searched here."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec

from kvxferd.errors import Code, KvxferdError
from kvxferd.records import (
    HandshakeRecord,
    PlacementRecord,
    PullRecord,
    Record,
    ReleaseRecord,
    TransportsRecord,
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
# One response's: 1.5 ms of the loop. The cursor leads to the others.
MAX_PAGE = 512
DEFAULT_PAGE = 256
# All kinds together have 47. They are split for each record: 8,000 commas took 150 ms of the loop.
MAXKINDS_CHARS = 64

KINDS: dict[str, type[Record]] = {
    "pull": PullRecord,
    "handshake": HandshakeRecord,
    "release": ReleaseRecord,
    "placement": PlacementRecord,
    "lanes": TransportsRecord,
}
_encoder = msgspec.msgpack.Encoder()
_KIND_NAMES = {kind: name for name, kind in KINDS.items()}

# Releases that no engine wanted.
_FAILED_RELEASES = frozenset({Code.LEASE_EXPIRED, Code.PUBLISHER_GONE, Code.RANK_LOST})


class HistoryQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which records are wanted. Each filter that is set must hold."""

    failed: bool = False  # pulls and handshakes that failed, and releases that no engine wanted
    slower: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # pulls and handshakes that took at least so many s
    transfer: str = ""  # its pulls and its release
    engine: str = ""  # an engine's id, on either side
    kind: Annotated[str, msgspec.Meta(max_length=MAXKINDS_CHARS)] = ""  # separated by commas; "": all
    after: str = ""  # a cursor of an earlier page: what came since; "": the last `limit` records
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


class HistoryPage(NamedTuple):
    """The records that a query found, oldest first."""

    records: list[Record]
    cursor: str  # for the next query's `after`
    dropped: int  # records after the query's cursor that were gone before anybody looked at them
    restarted: bool  # the query's cursor is of an earlier start of the daemon: all its records are gone
    is_complete: bool  # False: more records are here already


class History:
    """The last records. Once full, each new one drops the oldest; what failed or was slow stays longer."""

    def __init__(self, max_records: int = MAX_RECORDS, max_bytes: int = MAX_BYTES, boot: str = "") -> None:
        self._boot = boot
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

    def search(self, query: HistoryQuery) -> HistoryPage:
        """Return what the query finds. Raises KvxferdError(bad-request) for a cursor that is none."""
        if not query.after:
            found = [entry.item for entry in self._entries.all() if query.matches(entry.item)]
            return HistoryPage(found[-query.limit :], self._cursor(self._entries.last), 0, False, True)
        boot, after = _parse_cursor(query.after)
        restarted = boot != self._boot or after > self._entries.last
        after = 0 if restarted else after
        page: list[Record] = []
        num_seen, last_seen = 0, after
        for entry in self._entries.all():
            if entry.number <= after:
                continue
            if len(page) == query.limit:
                num_gone = last_seen - after - num_seen
                return HistoryPage(page, self._cursor(last_seen), num_gone, restarted, False)
            num_seen, last_seen = num_seen + 1, entry.number
            if query.matches(entry.item):
                page.append(entry.item)
        num_gone = self._entries.last - after - num_seen
        return HistoryPage(page, self._cursor(self._entries.last), num_gone, restarted, True)

    def _cursor(self, number: int) -> str:
        return f"{self._boot}-{number}"


def _parse_cursor(text: str) -> tuple[str, int]:
    boot, _, number = text.rpartition("-")
    if not (number.isascii() and number.isdecimal() and len(number) <= 18):
        raise KvxferdError(
            "cannot search the history: after is no cursor; give that of an earlier response, or none",
            Code.BAD_REQUEST,
        )
    return boot, int(number)


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


def kind_of(record: Record) -> str:
    """Return "pull", "handshake", "release", "placement" or "lanes"."""
    return _KIND_NAMES[type(record)]


def record_to_json(record: Record) -> dict[str, Any]:
    """Return the record as plain JSON, with its kind under `kind`."""
    return {"kind": kind_of(record), **msgspec.to_builtins(record)}


def record_from_json(value: dict[str, Any]) -> Record:
    """Return the record that `record_to_json` encoded. Raises msgspec.ValidationError or KeyError."""
    return msgspec.convert(value, KINDS[value["kind"]])
