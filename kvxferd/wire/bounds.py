"""Length limits for annotations of fields: a longer value cannot be decoded, so none is kept."""

from __future__ import annotations

import msgspec

from kvxferd.wire.limits import (
    MAX_DESCRIPTORS_PER_RANK,
    MAX_ENDPOINT_CHARS,
    MAX_METADATA_BYTES,
    MAX_NAME_CHARS,
    MAX_REASON_CHARS,
    MAX_REGIONS,
)
from kvxferd.wire.traceparent import TRACEPARENT_CHARS

NAME = msgspec.Meta(max_length=MAX_NAME_CHARS)
REQUIRED_NAME = msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)
ENDPOINT = msgspec.Meta(max_length=MAX_ENDPOINT_CHARS)
REASON = msgspec.Meta(max_length=MAX_REASON_CHARS)
METADATA = msgspec.Meta(max_length=MAX_METADATA_BYTES)
REGIONS = msgspec.Meta(max_length=MAX_REGIONS)
NUM_TOKENS = msgspec.Meta(ge=-1)  # -1: all
TRACEPARENT = msgspec.Meta(max_length=TRACEPARENT_CHARS)
PIECES = msgspec.Meta(max_length=MAX_DESCRIPTORS_PER_RANK)  # also of the address ranges inside them
