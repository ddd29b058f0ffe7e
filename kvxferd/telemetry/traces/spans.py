"""A transfer's spans, from the records of what ended. No part of this needs OpenTelemetry.

One request's tree, where it gave a traceparent; else `kvxferd.publish` is the root:

    the request's own span
      kvxferd.publish          source: from the publish to the release
      kvxferd.pull             sink: from the request to its terminal event
        kvxferd.handshake, .grant, .queue, .plan, .wire (with .post inside), .fence, .acknowledge
        kvxferd.handover       of a progressive pull: from when all was known to be ready, beside the others

The attributes are those of the records: ids of transfer, engines and ranks, never block ids, addresses in
memory, keys or the nonce.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple, assert_never

from kvxferd.errors import Code
from kvxferd.records import PullRecord, ReleaseRecord
from kvxferd.wire.traceparent import parent_id_of, span_id_for, trace_id_of

TracedRecord = PullRecord | ReleaseRecord

# How a publish ends as its engine means it to.
_GOOD_RELEASES = frozenset({Code.COMPLETED, Code.ABANDONED, Code.UNPUBLISHED})
# The phases with a mover. It measures the last try alone, and they end with the pull. Of a progressive pull
# they are those of all its pieces together, shown as if these had followed each other.
_MOVER_PHASES = ("connect", "queue", "plan", "wire", "fence")


class SpanKind(StrEnum):
    """OpenTelemetry's kinds, by their names."""

    INTERNAL = "INTERNAL"
    CLIENT = "CLIENT"  # it sends a request to another daemon
    PRODUCER = "PRODUCER"  # others read what it offers, later


class Span(NamedTuple):
    """One span, ended. Times are Unix seconds, ids hex digits."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str  # "": the root
    kind: SpanKind
    started_at: float
    ended_at: float
    attributes: dict[str, str | int | float | bool]
    error: str = ""  # why it failed; "": it did not


def spans_of(record: TracedRecord) -> Iterator[Span]:
    """Yield the record's spans, parents first. The record is stamped and has a traceparent."""
    match record:
        case PullRecord():
            yield from _spans_of_pull(record)
        case ReleaseRecord():
            yield _span_of_publish(record)
        case _:
            assert_never(record)


def _spans_of_pull(record: PullRecord) -> Iterator[Span]:
    error = "" if record.outcome == "delivered" else _sentence(record.code or record.outcome, record.message)
    whole = _span_of(
        record,
        "kvxferd.pull",
        SpanKind.CLIENT,
        {
            "kvxferd.source": record.source,
            "kvxferd.sink": record.sink,
            "kvxferd.rank": str(record.rank),
            "kvxferd.peer": record.peer.partition("#")[0],  # without its key
            "kvxferd.outcome": record.outcome,
            "kvxferd.bytes": record.bytes,
            "kvxferd.runs": record.runs,
            "kvxferd.retried": record.retried,
            **{f"kvxferd.bytes.{way}": count for way, count in record.ways.items() if count},
            **({"error.type": str(record.code)} if record.code is not None else {}),
            **({"kvxferd.failed_phase": record.failed_phase} if record.failed_phase else {}),
            **({"kvxferd.silent": record.silent} if record.silent else {}),
            **({"kvxferd.progressive": True} if record.progressive else {}),
            **({"kvxferd.hidden_bytes": record.hidden_bytes} if record.handover_s is not None else {}),
        },
        error,
    )
    yield whole
    for phase, started_at, ended_at in _phases_of(record):
        span = child_of(
            whole,
            phase,
            started_at,
            ended_at,
            SpanKind.CLIENT if phase in ("handshake", "grant", "acknowledge") else SpanKind.INTERNAL,
            error if phase == record.failed_phase else "",
        )
        yield span
        if phase == "wire" and (post_s := record.phases_s.get("post", 0.0)) > 0:
            yield child_of(span, "post", started_at, min(started_at + post_s, ended_at))
    if record.handover_s is not None:
        yield child_of(
            whole, "handover", max(record.started_at, record.ended_at - record.handover_s), record.ended_at
        )


def _phases_of(record: PullRecord) -> Iterator[tuple[str, float, float]]:
    """Yield the phases that the pull entered, with when each began and ended, in this order."""
    # Posts are spread over the reads: their span is within that of the wire.
    took = dict(record.phases_s)
    if "wire" in took:
        took["wire"] += took.get("post", 0.0)
    begin, end = record.started_at, record.ended_at
    at = begin
    for phase in ("handshake", "grant"):
        if phase in took:
            yield phase, at, (at := min(at + max(took[phase], 0.0), end))
    measured = [phase for phase in _MOVER_PHASES if phase in took]
    # A resident mover's figures are a worker's word: none may begin before the pull.
    start = max(at, end - sum(max(took[phase], 0.0) for phase in measured))
    for phase in measured:
        yield phase, start, (start := min(start + max(took[phase], 0.0), end))
    failed = "wire" if record.failed_phase == "post" else record.failed_phase
    if failed and failed not in took:
        yield failed, max(at, start) if measured else at, end
    if record.acknowledge_s is not None:
        yield "acknowledge", end, end + record.acknowledge_s


def _span_of_publish(record: ReleaseRecord) -> Span:
    return _span_of(
        record,
        "kvxferd.publish",
        SpanKind.PRODUCER,
        {
            "kvxferd.source": record.engine_id,
            "kvxferd.released": str(record.why),
            "kvxferd.bytes": record.bytes,
            **({} if record.why in _GOOD_RELEASES else {"error.type": str(record.why)}),
        },
        "" if record.why in _GOOD_RELEASES else f"released: {record.why}",
    )


def _span_of(
    record: TracedRecord,
    name: str,
    kind: SpanKind,
    attributes: dict[str, str | int | float | bool],
    error: str,
) -> Span:
    """Return the span of the whole record. A publish without a request's span is the root."""
    parent = parent_id_of(record.traceparent)
    return Span(
        name=name,
        trace_id=trace_id_of(record.traceparent),
        span_id=record.span_id,
        parent_id="" if parent == record.span_id else parent,
        kind=kind,
        started_at=record.started_at,
        ended_at=record.ended_at,
        attributes={"kvxferd.transfer_id": record.transfer_id, **attributes},
        error=error,
    )


def child_of(
    parent: Span,
    phase: str,
    started_at: float,
    ended_at: float,
    kind: SpanKind = SpanKind.INTERNAL,
    error: str = "",
) -> Span:
    """Return the span of one phase of `parent`. Its id follows from the parent's."""
    return Span(
        name=f"kvxferd.{phase}",
        trace_id=parent.trace_id,
        span_id=span_id_for(f"{parent.span_id} {phase}"),
        parent_id=parent.span_id,
        kind=kind,
        started_at=started_at,
        ended_at=ended_at,
        attributes={},
        error=error,
    )


def _sentence(code: str, message: str) -> str:
    return f"{code}: {message}" if message else str(code)
