"""An OpenTelemetry collector in a thread: it takes OTLP over HTTP, and keeps the spans it was sent."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class ReceivedSpan(NamedTuple):
    """One span as it came over the wire. Ids are hex digits."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    start_ns: int
    end_ns: int
    is_error: bool
    message: str
    attributes: dict[str, Any]
    resource: dict[str, Any]


class TraceReceiver:
    """Listens on a free port of 127.0.0.1. With `status` other than 200 it refuses what it is sent."""

    def __init__(self) -> None:
        self.status = 200
        self.spans: list[ReceivedSpan] = []
        self._lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver._take(self.path, self.headers["Content-Type"], body)
                self.send_response(receiver.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def of_trace(self, trace_id: str) -> list[ReceivedSpan]:
        with self._lock:
            return [span for span in self.spans if span.trace_id == trace_id]

    def _take(self, path: str, content_type: str, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        assert (path, content_type) == ("/v1/traces", "application/x-protobuf")
        request = ExportTraceServiceRequest.FromString(body)
        with self._lock:
            if self.status == 200:
                self.spans += _spans(request)


def _spans(request: Any) -> list[ReceivedSpan]:
    return [
        ReceivedSpan(
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            kind=span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
            start_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            is_error=span.status.code == span.status.STATUS_CODE_ERROR,
            message=span.status.message,
            attributes=_attributes(span.attributes),
            resource=_attributes(of_resource.resource.attributes),
        )
        for of_resource in request.resource_spans
        for of_scope in of_resource.scope_spans
        for span in of_scope.spans
    ]


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
