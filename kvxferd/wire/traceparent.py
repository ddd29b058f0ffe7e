"""The header `traceparent` of W3C Trace Context, which joins a transfer to the trace of its request.

It is a hint from outside: a value that is not valid is ignored, as the recommendation asks, and costs
its request nothing but its spans. https://www.w3.org/TR/trace-context/#traceparent-header
"""

from __future__ import annotations

import hashlib
import re

TRACEPARENT_CHARS = 55  # of version 00: "00-" trace id "-" span id "-" flags
SAMPLED = 0x01
# A later version may append fields behind a dash. A longer text is not looked at.
MAX_HEADER_CHARS = 512
_FIELDS = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)


def read_traceparent(value: object) -> str:
    """Return the header in the form of version 00, 55 characters; "" where it is not valid.

    A later version is read by its first four fields. Of the flags only "sampled" is kept: the others are
    unknown to version 00.
    """
    if not isinstance(value, str) or len(value) > MAX_HEADER_CHARS:
        return ""
    found = _FIELDS.fullmatch(value)
    if found is None:
        return ""
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more is not None):
        return ""
    if not int(trace_id, 16) or not int(span_id, 16):
        return ""
    return f"00-{trace_id}-{span_id}-{int(flags, 16) & SAMPLED:02x}"


def trace_id_of(traceparent: str) -> str:
    """Return the trace's id, 32 hex digits. The header has been read by `read_traceparent`."""
    return traceparent[3:35]


def parent_id_of(traceparent: str) -> str:
    """Return the parent's span id, 16 hex digits. The header has been read by `read_traceparent`."""
    return traceparent[36:52]


def is_sampled(traceparent: str) -> bool:
    """Whether the parent is recorded, and with it what happens below it; False for ""."""
    return bool(traceparent) and bool(int(traceparent[53:55], 16) & SAMPLED)


def span_id_for(name: str) -> str:
    """Return the span id of what has that name, 16 hex digits: the same on both nodes, and no secret."""
    return _digest("span", name)[:16]


def root_traceparent(nonce: str, sample_ratio: float) -> str:
    """Return the header for a transfer whose engine gave none; "" where it is not sampled.

    Both nodes compute the same from the transfer's nonce, without a message. The parent is the span of
    the publish itself, which has none.
    """
    trace_id = _digest("trace", nonce)[:32]
    # As OpenTelemetry's TraceIdRatioBased, by the id's lower half: a larger ratio includes a smaller one.
    if int(trace_id[16:], 16) >= sample_ratio * (1 << 64):
        return ""
    return f"00-{trace_id}-{span_id_for(nonce)}-{SAMPLED:02x}"


def _digest(kind: str, name: str) -> str:
    return hashlib.sha256(f"kvxferd {kind} {name}".encode(errors="replace")).hexdigest()
