"""The frames that 0.1 spoke, as recorded from its code: see fixtures/record.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

DIRECTORY = Path(__file__).parent / "fixtures" / "0.1"
HEADER_BYTES = 8


class Recorded(NamedTuple):
    """One frame, and the fields of its message."""

    name: str
    num_fds: int
    frame: bytes
    fields: dict[str, Any]

    @property
    def payload(self) -> bytes:
        """The message alone: what a peer sends."""
        return self.frame[HEADER_BYTES:]


def frames(union: str) -> list[Recorded]:
    """Return the frames of `client`, `daemon`, `peer` or `session`."""
    found = msgspec.json.decode((DIRECTORY / f"{union}.json").read_bytes())
    return [Recorded(r["name"], r["num_fds"], bytes.fromhex(r["frame"]), r["fields"]) for r in found]


def references() -> list[str]:
    """Return references as JSON."""
    found: list[str] = msgspec.json.decode((DIRECTORY / "references.json").read_bytes())
    return found
