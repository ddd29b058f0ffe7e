"""Codes and fields of later versions, and what a side of an earlier one receives in their place."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from kvxferd.errors import Code
from kvxferd.wire.common import Message, TransferRef
from kvxferd.wire.peer import FIRST_WITH_PROGRESS, Acknowledge, AskGrant, Granted, RankReady

M = TypeVar("M", bound=Message)

# A side cannot decode a code of a later version. Each code that came with version 2, and the closest
# one of version 1.
VERSION_1_CODES: dict[Code, Code] = {Code.SOURCE_STALLED: Code.BUSY}

# Fields that came with version 2, at the default that is not sent.
FIELDS_SINCE_VERSION_2: dict[type[Message], dict[str, object]] = {RankReady: {"incarnation": ""}}

# Fields between daemons that came with version 3 of their protocol, likewise.
FIELDS_SINCE_VERSION_3: dict[type[Message], dict[str, object]] = {Acknowledge: {"bytes": 0}}


# Likewise, with version 5. A side of an earlier version waits for the whole transfer. (A member does not send
# an earlier home that a part is written: it would take it for the whole.)
FIELDS_SINCE_VERSION_5: dict[type[Message], dict[str, object]] = {
    AskGrant: {"after_tokens": -1},
    Granted: {"part_bytes": 0},
}


def for_peer_version(message: M, version: int) -> M:
    """Return the message as a daemon of that version reads it; nearly always unchanged."""
    if version < FIRST_WITH_PROGRESS and (fields := FIELDS_SINCE_VERSION_5.get(type(message))) is not None:
        message = msgspec.structs.replace(message, **fields)
    if version < 3 and (fields := FIELDS_SINCE_VERSION_3.get(type(message))) is not None:
        message = msgspec.structs.replace(message, **fields)
    return for_version_1(message) if version < 2 else message


def for_version_1(message: M) -> M:
    """Return the message with the codes and fields of version 1; nearly always unchanged."""
    if (older_fields := FIELDS_SINCE_VERSION_2.get(type(message))) is not None:
        message = msgspec.structs.replace(message, **older_fields)
    ref = getattr(message, "ref", None)
    if isinstance(ref, TransferRef) and ref.trace:
        # Version 1 refuses a reference with a field that it does not know.
        message = msgspec.structs.replace(message, ref=ref.with_trace(""))
    older_code = VERSION_1_CODES.get(getattr(message, "code", None) or getattr(message, "why", None))  # type: ignore[arg-type]
    if older_code is None:
        return message
    field = "code" if hasattr(message, "code") else "why"
    return msgspec.structs.replace(message, **{field: older_code})
