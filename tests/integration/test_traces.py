"""Spans of two real daemons, collected over OTLP: one tree a request, with the right parents."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.nodes.fleet import Fleet
from tests.support.nodes.requests import TOKENS, ids_for, publish, pull_and_check, spec_of
from tests.support.nodes.waiting import wait_until
from tests.support.python_process import run_kvxferd
from tests.support.trace_receiver import ReceivedSpan, TraceReceiver

FIRST, SECOND, QUIET = "1" * 32, "2" * 32, "3" * 32  # trace ids
PREFILL, DECODE = "a" * 16, "b" * 16  # spans of the engines' requests


def header(trace_id: str, span_id: str, flags: str = "01") -> str:
    return f"00-{trace_id}-{span_id}-{flags}"


@pytest.fixture
def receiver() -> Iterator[TraceReceiver]:
    pytest.importorskip("opentelemetry.sdk", reason="kvxferd[tracing] is not installed")
    receiver = TraceReceiver()
    try:
        yield receiver
    finally:
        receiver.close()


def test_one_tree_over_two_daemons_for_each_that_is_sampled_and_the_error_of_a_pull_that_fails(
    fleet: Fleet, receiver: TraceReceiver
) -> None:
    began_ns = time.time_ns()
    tracing = ("--tracing-endpoint", receiver.endpoint, "--tracing-sample-ratio", "1")
    prefill, decode = fleet.daemon("prefill", *tracing), fleet.daemon("decode", *tracing)
    (source,) = fleet.engine(prefill, spec_of("prefill"))
    sinks = fleet.engine(decode, spec_of("decode", tp_size=2))

    def published(request: int, traceparent: str) -> dict[str, object]:
        ids = ids_for(request)
        source.write(request, ids, TOKENS)
        return source.publish(f"req-{request}", ids, TOKENS, traceparent=traceparent)

    ref = published(1, header(FIRST, PREFILL))
    assert ref["traceparent"] == header(FIRST, PREFILL)
    pull_and_check(sinks, ref | {"traceparent": header(FIRST, DECODE)}, 1)
    assert source.await_event("Released")["why"] == "completed"

    ref = published(2, header(SECOND, PREFILL))
    source.unpublish(ref)
    assert source.await_event("Released")["why"] == "unpublished"
    name, fields = sinks[0].end_of(sinks[0].pull(ref, ids_for(5), TOKENS))
    assert (name, fields["code"]) == ("Failed", "released")

    # Not sampled: pulled as ever, and not traced. Invalid, and none at all: by the ratio.
    for request, traceparent in ((3, header(QUIET, PREFILL, "00")), (4, "no traceparent"), (5, "")):
        pull_and_check(sinks, published(request, traceparent), request)
        source.await_event("Released")

    first = _tree(receiver, FIRST, num_spans=1 + 2 * (1 + 9), parents={PREFILL, DECODE})
    (released,), pulls = _named(first, "publish"), _named(first, "pull")
    assert [released.parent_id, *(pull.parent_id for pull in pulls)] == [PREFILL, DECODE, DECODE]
    nodes = {pull.resource["service.instance.id"] for pull in pulls}
    assert len(nodes) == 1
    assert nodes != {released.resource["service.instance.id"]}
    second = _tree(receiver, SECOND, num_spans=1 + 1 + 2, parents={PREFILL})
    errors = {name: _named(second, name)[0].is_error for name in ("publish", "pull", "grant")}
    assert errors == {"publish": False, "pull": True, "grant": True}  # its engine withdrew it
    others = lambda: {span.trace_id for span in receiver.spans} - {FIRST, SECOND}  # noqa: E731
    wait_until(lambda: len(others()) == 2, "those by the ratio")
    for trace_id in others():
        spans = _tree(receiver, trace_id, num_spans=1 + 2 * (1 + 9), parents={""})
        (root,) = [span for span in spans if not span.parent_id]
        assert root.name == "kvxferd.publish"
        assert [pull.parent_id for pull in _named(spans, "pull")] == [root.span_id] * 2
    assert QUIET not in others()
    for span in receiver.spans:
        assert began_ns <= span.start_ns <= span.end_ns <= time.time_ns()
        assert span.resource["service.name"] == "kvxferd"
        text = str(span.attributes) + span.message
        assert str(ref["nonce"]) not in text


def _tree(receiver: TraceReceiver, trace_id: str, num_spans: int, parents: set[str]) -> list[ReceivedSpan]:
    """The trace's spans, once all are there: each hangs on another, or on a span of an engine."""
    wait_until(
        lambda: len(receiver.of_trace(trace_id)) >= num_spans,
        f"{num_spans} spans of {trace_id}: {sorted(span.name for span in receiver.of_trace(trace_id))}",
    )
    spans = receiver.of_trace(trace_id)
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans) == num_spans, sorted(span.name for span in spans)
    for span in spans:
        assert span.parent_id in by_id or span.parent_id in parents, span
    return spans


def _named(spans: list[ReceivedSpan], name: str) -> list[ReceivedSpan]:
    return [span for span in spans if span.name == f"kvxferd.{name}"]


def test_nothing_of_opentelemetry_is_imported_when_it_is_off(fleet: Fleet, tmp_path: Path) -> None:
    broken = tmp_path / "broken" / "opentelemetry"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('imported', name='opentelemetry')\n")
    path = {"PYTHONPATH": str(broken.parent)}
    daemon = fleet.daemon("node", **path)
    sources, sinks = fleet.engine(daemon, spec_of("prefill")), fleet.engine(daemon, spec_of("decode"))
    pull_and_check(sinks, publish(sources, 1) | {"traceparent": header(FIRST, DECODE)}, 1)
    flags = ("--http-bind", "", "--peer-bind", "tcp://127.0.0.1:0", "--tracing-endpoint", "http://h:4318")
    ended = run_kvxferd("serve", "--node-run-dir", tmp_path / "on", *flags, **path)
    assert ended.returncode == 2
    assert "cannot use tracing.endpoint: opentelemetry is not installed; pip install" in ended.stderr
