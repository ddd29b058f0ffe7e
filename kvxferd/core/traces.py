"""Which trace a transfer belongs to. Spans are made from the records, outside the core."""

from __future__ import annotations

from kvxferd.core.settings import Settings
from kvxferd.wire.traceparent import is_sampled, read_traceparent, root_traceparent


def sampled_trace(settings: Settings, traceparent: str, nonce: str) -> str:
    """Return the traceparent under which this node records a transfer; "": it does not.

    A request's own trace decides by its flag "sampled". A transfer whose engine gave none starts a trace
    with the probability `trace_sample_ratio`, the same on both nodes.
    """
    if not settings.tracing:
        return ""
    if trace := read_traceparent(traceparent):
        return trace if is_sampled(trace) else ""
    return root_traceparent(nonce, settings.trace_sample_ratio) if settings.trace_sample_ratio else ""
