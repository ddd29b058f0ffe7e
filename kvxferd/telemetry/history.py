"""The last records of this node, for `/v1/history`: bounded in number and bytes, and searched here."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import msgspec

from kvxferd.errors import Code, KvxferdError
from kvxferd.records import (
    HandshakeRecord,
    PlacementRecord,
    PullRecord,
    Record,
    ReleaseRecord,
    TopologyRecord,
    TransportsRecord,
)

# A record is about 1 KiB, so this is 1 MiB: two seconds of a node with 500 pulls a second, hours of others.
MAX_RECORDS = 1024
# Of a busy node's older records, those that somebody looks for, each kind apart: what failed, and what took
# long. A wave of slow pulls drops no failure.
MAX_FAILED = 512
MAX_SLOW = 256
SLOW_S = 1.0
# Names have up to 256 characters and messages 2,000: longer records are fewer.
MAX_BYTES = 2 << 20
# One response's: 1.5 ms of the loop. The cursor leads to the others.
MAX_PAGE = 512
DEFAULT_PAGE = 256
# All kinds together have 47. They are split for each record: 8,000 commas took 150 ms of the loop.
MAXKINDS_CHARS = 64

KINDS: dict[str, type[Record]] = {
    "pull": PullRecord,
    "handshake": HandshakeRecord,
    "release": ReleaseRecord,
    "topology": TopologyRecord,
    "placement": PlacementRecord,
    "lanes": TransportsRecord,
}
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


class _Entry(NamedTuple):
    number: int  # from 1, one more for each record
    record: Record
    size: int


class _Ring:
    """The last entries, bounded in number and bytes."""

    def __init__(self, max_records: int, max_bytes: int) -> None:
        self._max_records = max_records
        self._max_bytes = max_bytes
        self.entries: deque[_Entry] = deque()
        self.num_bytes = 0

    def add(self, entry: _Entry) -> list[_Entry]:
        """Append an entry; return those that give way."""
        gone = []
        self.entries.append(entry)
        self.num_bytes += entry.size
        while len(self.entries) > self._max_records or self.num_bytes > self._max_bytes:
            oldest = self.entries.popleft()
            self.num_bytes -= oldest.size
            gone.append(oldest)
        return gone


class History:
    """The last records. Once full, each new one drops the oldest; what failed or was slow stays longer."""

    def __init__(self, max_records: int = MAX_RECORDS, max_bytes: int = MAX_BYTES, boot: str = "") -> None:
        self._boot = boot
        self._last = 0
        self._recent = _Ring(max_records, max_bytes)
        self._failed = _Ring(MAX_FAILED, max_bytes // 4)  # older than those
        self._slow = _Ring(MAX_SLOW, max_bytes // 4)

    def add(self, record: Record) -> None:
        """Append a record."""
        self._last += 1
        for oldest in self._recent.add(_Entry(self._last, record, _size_of(record))):
            if has_failed(oldest.record):
                self._failed.add(oldest)
            elif (duration_of(oldest.record) or 0.0) >= SLOW_S:
                self._slow.add(oldest)

    def records(self) -> list[Record]:
        """Return the records, oldest first."""
        return [entry.record for entry in self._all()]

    def failed_pulls(self) -> list[PullRecord]:
        """Return the failed pulls, the latest first. Those that were cancelled are none."""
        found = (record for record in self.records() if isinstance(record, PullRecord))
        return [record for record in found if record.has_failed][::-1]

    def expired_leases(self) -> list[ReleaseRecord]:
        """Return the transfers whose lease expired, the latest first."""
        found = (record for record in self.records() if isinstance(record, ReleaseRecord))
        return [record for record in found if record.why is Code.LEASE_EXPIRED][::-1]

    def _all(self) -> Iterator[_Entry]:
        return heapq.merge(self._failed.entries, self._slow.entries, self._recent.entries)

    def search(self, query: HistoryQuery) -> HistoryPage:
        """Return what the query finds. Raises KvxferdError(bad-request) for a cursor that is none."""
        if not query.after:
            found = [entry.record for entry in self._all() if query.matches(entry.record)]
            return HistoryPage(found[-query.limit :], self._cursor(self._last), 0, False, True)
        boot, after = _parse_cursor(query.after)
        restarted = boot != self._boot or after > self._last
        after = 0 if restarted else after
        page: list[Record] = []
        num_seen, last_seen = 0, after
        for entry in self._all():
            if entry.number <= after:
                continue
            if len(page) == query.limit:
                num_gone = last_seen - after - num_seen
                return HistoryPage(page, self._cursor(last_seen), num_gone, restarted, False)
            num_seen, last_seen = num_seen + 1, entry.number
            if query.matches(entry.record):
                page.append(entry.record)
        num_gone = self._last - after - num_seen
        return HistoryPage(page, self._cursor(self._last), num_gone, restarted, True)

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


# By kind of record, the fields that may be texts: a third of them, and sizes are taken of every pull.
_text_fields: dict[type[Record], tuple[str, ...]] = {}


def _size_of(record: Record) -> int:
    """Return about how many bytes the record takes: its texts, and 512 for everything else."""
    if (names := _text_fields.get(type(record))) is None:
        # A field that is a number or a table in one record is no text in another.
        fields = record.__struct_fields__
        names = tuple(name for name in fields if isinstance(getattr(record, name), str | None))
        _text_fields[type(record)] = names
    size = 512
    for name in names:
        if isinstance(text := getattr(record, name), str):
            size += len(text)
    if isinstance(record, ReleaseRecord):
        size += sum(256 + sum(map(len, reader.peers)) for reader in record.readers)
    return size


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
        case PullRecord() | TopologyRecord():
            return (record.source, record.sink)
        case ReleaseRecord():
            return (record.engine_id, *(reader.engine_id for reader in record.readers))
        case _:
            return (record.engine_id,)


def stamped(record: Record, ended_at: float) -> Record:
    """Return the record with its times of day, in Unix seconds."""
    match record:
        case PullRecord():
            took_s = record.total_s
        case HandshakeRecord():
            took_s = record.elapsed_s
        case ReleaseRecord():
            took_s = record.held_s
        case _:
            return msgspec.structs.replace(record, ended_at=ended_at)
    return msgspec.structs.replace(record, ended_at=ended_at, started_at=ended_at - took_s)


def kind_of(record: Record) -> str:
    """Return "pull", "handshake", "release", "topology", "placement" or "lanes"."""
    return _KIND_NAMES[type(record)]


def record_to_json(record: Record) -> dict[str, Any]:
    """Return the record as plain JSON, with its kind under `kind`."""
    return {"kind": kind_of(record), **msgspec.to_builtins(record)}


def record_from_json(value: dict[str, Any]) -> Record:
    """Return the record that `record_to_json` encoded. Raises msgspec.ValidationError or KeyError."""
    return msgspec.convert(value, KINDS[value["kind"]])
