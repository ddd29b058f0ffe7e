"""Sends spans to a collector with OpenTelemetry's SDK: OTLP over HTTP, as protobuf.

Only a daemon with `tracing.endpoint` imports this, and with it opentelemetry.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import kvxferd
from kvxferd.errors import ConfigError
from kvxferd.ids import BootId, Endpoint
from kvxferd.telemetry.traces.spans import Span

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
except ImportError as missing:
    raise ConfigError(
        f"cannot use tracing.endpoint: {missing.name or 'opentelemetry'} is not installed; "
        "pip install 'kvxferd[tracing]', or leave the setting empty"
    ) from missing

EXPORT_S = 5.0  # for one batch, with the exporter's own repetitions
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class OtlpExporter:
    """Sends spans to one collector. `export` blocks for `EXPORT_S` at most."""

    def __init__(self, endpoint: str, boot: BootId, node: Endpoint) -> None:
        # The exporter logs each failure; the tracer logs when they begin and end.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._resource = Resource(
            {
                "service.name": "kvxferd",
                "service.version": kvxferd.__version__,
                "service.instance.id": str(boot),
                "host.name": socket.gethostname(),
                "kvxferd.endpoint": str(node).partition("#")[0],
            }
        )
        self._scope = InstrumentationScope("kvxferd", kvxferd.__version__)
        self._url = traces_url(endpoint)
        self._exporter: Any = OTLPSpanExporter(endpoint=self._url, timeout=EXPORT_S)

    def export(self, spans: Sequence[Span]) -> str:
        """Send the spans. Return why the collector did not take them; "": it did."""
        result = self._exporter.export([self._readable(span) for span in spans])
        return (
            "" if result is SpanExportResult.SUCCESS else f"the collector at {self._url} does not take them"
        )

    def close(self) -> None:
        """Give up a request that is repeated, and close the connection."""
        self._exporter.shutdown()

    def _readable(self, span: Span) -> ReadableSpan:
        return ReadableSpan(
            name=span.name,
            context=_context(span.trace_id, span.span_id, is_remote=False),
            parent=_context(span.trace_id, span.parent_id, is_remote=True) if span.parent_id else None,
            resource=self._resource,
            attributes=span.attributes,
            kind=SpanKind[span.kind.value],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=int(span.started_at * 1e9),
            end_time=int(span.ended_at * 1e9),
            instrumentation_scope=self._scope,
        )


def _context(trace_id: str, span_id: str, is_remote: bool) -> SpanContext:
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=is_remote, trace_flags=_SAMPLED)


def traces_url(endpoint: str) -> str:
    """Return the URL to send to: OTLP's own path where the setting has none."""
    return endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
