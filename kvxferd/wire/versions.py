"""What a side that speaks version 1 of a protocol gets in place of what it does not know."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from kvxferd.errors import Code
from kvxferd.wire.common import Message
from kvxferd.wire.peer import RankReady

M = TypeVar("M", bound=Message)

# A side decodes only the codes that it knows. Each code that came with version 2, and which of
# version 1 says most of the same.
VERSION_1_CODES: dict[Code, Code] = {Code.SOURCE_STALLED: Code.BUSY}


# Fields that came with version 2, at the default that is not sent.
FIELDS_SINCE_VERSION_2: dict[type[Message], dict[str, object]] = {RankReady: {"incarnation": ""}}


def for_version_1(message: M) -> M:
    """Return the message with the codes and fields that version 1 knows; itself, nearly always."""
    if (older_fields := FIELDS_SINCE_VERSION_2.get(type(message))) is not None:
        message = msgspec.structs.replace(message, **older_fields)
    older_code = VERSION_1_CODES.get(getattr(message, "code", None) or getattr(message, "why", None))  # type: ignore[arg-type]
    if older_code is None:
        return message
    field = "code" if hasattr(message, "code") else "why"
    return msgspec.structs.replace(message, **{field: older_code})
