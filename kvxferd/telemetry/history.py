"""The last records of this node, for `/v1/history`."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from kvxferd.core.snapshot import (
    HandshakeRecord,
    PlacementRecord,
    PullRecord,
    Record,
    ReleaseRecord,
    TopologyRecord,
    TransportsRecord,
)

# A record is under 1 KiB, so this is 1 MiB at most: some minutes of a busy node.
MAX_RECORDS = 1024

_KINDS: dict[str, type[Record]] = {
    "pull": PullRecord,
    "handshake": HandshakeRecord,
    "release": ReleaseRecord,
    "topology": TopologyRecord,
    "placement": PlacementRecord,
    "lanes": TransportsRecord,
}
_KIND_NAMES = {kind: name for name, kind in _KINDS.items()}


class History:
    """The last records, oldest first. Once full, each new record drops the oldest."""

    def __init__(self, max_records: int = MAX_RECORDS) -> None:
        self._records: deque[Record] = deque(maxlen=max_records)

    def add(self, record: Record) -> None:
        """Append a record."""
        self._records.append(record)

    def records(self) -> list[Record]:
        """Return the records, oldest first."""
        return list(self._records)


def kind_of(record: Record) -> str:
    """Return "pull", "handshake", "release", "topology", "placement" or "lanes"."""
    return _KIND_NAMES[type(record)]


def record_to_json(record: Record) -> dict[str, Any]:
    """Return the record as plain JSON, with its kind under `kind`."""
    return {"kind": kind_of(record), **msgspec.to_builtins(record)}


def record_from_json(value: dict[str, Any]) -> Record:
    """Return the record that `record_to_json` encoded. Raises msgspec.ValidationError or KeyError."""
    return msgspec.convert(value, _KINDS[value["kind"]])
