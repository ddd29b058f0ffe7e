"""Spans from records: a tree whatever the record's figures are."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.errors import Code
from kvxferd.ids import BootId, Endpoint
from kvxferd.records import PHASES, PullRecord, ReleaseRecord
from kvxferd.telemetry.traces import tracer as module
from kvxferd.telemetry.traces.spans import Span, TracedRecord, spans_of
from kvxferd.telemetry.traces.tracer import MAX_BATCH, MAX_QUEUED, Tracer
from kvxferd.wire.traceparent import span_id_for
from tests.support.trace_receiver import TraceReceiver

TRACE, PARENT, OWN = "1" * 32, "a" * 16, "c" * 16
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
STARTED = 1_800_000_000.0

phase_times = st.dictionaries(st.sampled_from(PHASES), st.floats(-1, 1e4))
texts = st.text(max_size=40)


def pull_record(**more: object) -> PullRecord:
    fields: dict[str, object] = {
        "pull": 1, "transfer_id": "t", "source": "p", "sink": "d", "rank": (0, 0), "outcome": "delivered",
        "code": None, "message": "", "bytes": 4096, "runs": 8, "total_s": 2.0, "phases_s": {},
        "started_at": STARTED, "ended_at": STARTED + 2.0, "traceparent": TRACEPARENT, "span_id": OWN,
    }  # fmt: skip
    return PullRecord(**(fields | more))  # type: ignore[arg-type]


@st.composite
def records(draw: st.DrawFn) -> TracedRecord:
    stamped = {"started_at": STARTED, "ended_at": STARTED + draw(st.floats(0, 1e5))}
    stamped |= {"traceparent": TRACEPARENT, "span_id": OWN}
    if draw(st.booleans()):
        why = draw(st.sampled_from(list(Code)))
        return ReleaseRecord(transfer_id="t", engine_id="p", why=why, held_s=1.0, **stamped)  # type: ignore[arg-type]
    outcome = draw(st.sampled_from(["delivered", "failed", "cancelled"]))
    failed = outcome != "delivered"
    return pull_record(
        outcome=outcome,
        code=draw(st.sampled_from(list(Code))) if failed else None,
        message=draw(texts),
        phases_s=draw(phase_times),
        acknowledge_s=None if failed else draw(st.floats(0, 1e4)),
        failed_phase=draw(st.sampled_from(PHASES)) if failed else "",
        silent=draw(texts),
        handover_s=None if failed else draw(st.none() | st.floats(0, 1e6)),
        **stamped,
    )


@given(records())
def test_every_record_is_one_tree_within_its_time(record: TracedRecord) -> None:
    first, *others = spans_of(record)
    assert (first.trace_id, first.span_id, first.parent_id) == (TRACE, OWN, PARENT)
    known = {first.span_id: first}
    for span in others:
        assert span.trace_id == TRACE
        assert span.parent_id in known  # parents first
        assert span.span_id not in known
        known[span.span_id] = span
    for span in known.values():
        assert record.started_at <= span.started_at <= span.ended_at
        assert span.ended_at <= record.ended_at or span.name == "kvxferd.acknowledge"
        assert len(span.span_id) == 16
    failed = isinstance(record, PullRecord) and record.outcome != "delivered"
    assert bool(first.error) == failed or not isinstance(record, PullRecord)


def names(spans: list[Span]) -> list[str]:
    return [span.name.removeprefix("kvxferd.") for span in spans]


def test_the_phases_of_a_delivered_pull_follow_each_other() -> None:
    took = {
        "handshake": 0.2, "grant": 0.3, "connect": 0.1, "queue": 0.1, "plan": 0.1, "post": 0.05, "wire": 0.75,
        "fence": 0.1, "other": 0.3,
    }  # fmt: skip
    spans = list(spans_of(pull_record(phases_s=took, acknowledge_s=0.5)))
    assert names(spans) == [
        "pull", "handshake", "grant", "connect", "queue", "plan", "wire", "post", "fence", "acknowledge",
    ]  # fmt: skip
    begins = [round(span.started_at - STARTED, 3) for span in spans]
    assert begins == [0.0, 0.0, 0.2, 0.8, 0.9, 1.0, 1.1, 1.1, 1.9, 2.0]  # it had no mover from 0.5 on
    assert round(spans[-1].ended_at - STARTED, 3) == 2.5
    assert not any(span.error for span in spans)


def test_a_handover_is_a_span_at_the_pulls_end() -> None:
    record = pull_record(
        phases_s={"grant": 0.5, "wire": 1.0}, progressive=True, hidden_bytes=4000, handover_s=0.25
    )
    whole, *others = spans_of(record)
    assert whole.attributes["kvxferd.hidden_bytes"] == 4000
    assert whole.attributes["kvxferd.progressive"] is True
    assert names(others) == ["grant", "wire", "handover"]
    assert (others[-1].started_at, others[-1].ended_at) == (STARTED + 1.75, STARTED + 2.0)


def test_the_phase_in_which_a_pull_failed_has_the_error() -> None:
    failed = pull_record(
        outcome="failed", code=Code.DEADLINE, message="too late", phases_s={"handshake": 0.5},
        failed_phase="grant", silent="tcp://p:1", peer=f"tcp://h:1#{'ab' * 32}",
    )  # fmt: skip
    spans = list(spans_of(failed))
    assert [(name, span.error) for name, span in zip(names(spans), spans, strict=True)] == [
        ("pull", "deadline: too late"),
        ("handshake", ""),
        ("grant", "deadline: too late"),
    ]
    assert spans[2].started_at == spans[1].ended_at
    assert spans[2].ended_at == spans[0].ended_at
    assert spans[0].attributes["kvxferd.silent"] == "tcp://p:1"
    assert spans[0].attributes["error.type"] == "deadline"
    assert spans[0].attributes["kvxferd.peer"] == "tcp://h:1", "no span names a key"


def test_a_publish_that_starts_the_trace_has_no_parent() -> None:
    root = span_id_for("nonce")
    record = ReleaseRecord(
        transfer_id="t", engine_id="p", why=Code.LEASE_EXPIRED, held_s=1.0,  # type: ignore[arg-type]
        traceparent=f"00-{TRACE}-{root}-01", span_id=root, started_at=STARTED, ended_at=STARTED + 1,
    )  # fmt: skip
    (span,) = spans_of(record)
    assert (span.parent_id, span.error) == ("", "released: lease-expired")


# --- the queue and its thread: bounded, and never in the caller's way


LIMIT_S = 30.0


class Exported:
    """An exporter that may be held up, may refuse, and keeps what it was given."""

    def __init__(self) -> None:
        self.batches: list[Sequence[Span]] = []
        self.go, self.busy, self.done = threading.Event(), threading.Event(), threading.Event()
        self.failure: str | Exception = ""
        self.closed = 0
        self.go.set()

    def export(self, spans: Sequence[Span]) -> str:
        self.busy.set()
        assert self.go.wait(LIMIT_S)
        self.batches.append(spans)
        self.done.set()
        if isinstance(self.failure, Exception):
            raise self.failure
        return self.failure

    def close(self) -> None:
        self.closed += 1
        self.go.set()


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Exported:
    monkeypatch.setattr(module, "INTERVAL_S", 0.01)
    return Exported()


@pytest.fixture
def tracer(exported: Exported) -> Iterator[Tracer]:
    tracer = Tracer(exported.export, exported.close)
    tracer.start()
    yield tracer
    exported.go.set()
    tracer.close()
    assert not tracer._thread.is_alive()


def test_while_the_collector_is_silent_the_queue_is_bounded(tracer: Tracer, exported: Exported) -> None:
    exported.go.clear()
    tracer.add(pull_record())
    assert exported.busy.wait(LIMIT_S)  # the thread waits for the collector: adding does not
    with structlog.testing.capture_logs() as lines:
        for _ in range(3 * MAX_QUEUED):
            tracer.add(pull_record())
        assert len(tracer._queue) == MAX_QUEUED
        exported.go.set()
        tracer.close()
    assert sum(map(len, exported.batches)) == 1 + MAX_QUEUED
    assert max(map(len, exported.batches)) <= MAX_BATCH
    assert [(line["event"], line["records"]) for line in lines] == [("traces dropped", 2 * MAX_QUEUED)]


@pytest.mark.parametrize("failure", ["refused", ValueError("a span that cannot be encoded")])
def test_failures_are_logged_once(tracer: Tracer, exported: Exported, failure: str | Exception) -> None:
    exported.failure = failure
    with structlog.testing.capture_logs() as lines:
        for _ in range(3):
            exported.done.clear()
            tracer.add(pull_record())
            assert exported.done.wait(LIMIT_S)
        exported.failure = ""
        tracer.add(pull_record())
        tracer.close()
    assert [line["event"] for line in lines] == ["traces not exported", "traces exported again"]


def test_the_end_waits_for_a_silent_collector_no_longer_than_it_may(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.05)
    exported.go.clear()
    tracer = Tracer(exported.export, exported.close)
    tracer.start()
    tracer.add(pull_record())
    assert exported.busy.wait(LIMIT_S)
    tracer.close()  # ends the request
    assert exported.closed == 1
    tracer._thread.join(LIMIT_S)
    assert not tracer._thread.is_alive()


# --- what a collector gets over OTLP, and collectors that refuse


@pytest.fixture
def receiver() -> Iterator[TraceReceiver]:
    pytest.importorskip("opentelemetry.sdk", reason="kvxferd[tracing] is not installed")
    receiver = TraceReceiver()
    yield receiver
    receiver.close()


def test_what_the_collector_gets_and_what_one_says_that_refuses(receiver: TraceReceiver) -> None:
    from kvxferd.telemetry.traces.otlp import OtlpExporter

    exporter = OtlpExporter(receiver.endpoint, BootId("boot-1"), Endpoint(f"tcp://h:1#{'ab' * 32}"))
    receiver.status = 400
    assert "does not take them" in exporter.export(list(spans_of(pull_record())))
    receiver.status = 200
    failed = pull_record(
        outcome="failed", code=None, message="\xe9\U0001f600", failed_phase="grant", bytes=1 << 40
    )
    assert exporter.export(list(spans_of(failed))) == ""
    exporter.close()
    pull, grant = receiver.spans
    assert (pull.trace_id, pull.span_id, pull.parent_id) == (TRACE, OWN, PARENT)
    assert (pull.kind, pull.is_error, pull.message) == ("CLIENT", True, "failed: \xe9\U0001f600")
    assert pull.attributes["kvxferd.bytes"] == 1 << 40
    assert pull.end_ns - pull.start_ns == 2 * 10**9
    assert (grant.parent_id, grant.is_error) == (OWN, True)
    assert pull.resource["service.name"] == "kvxferd"
    assert pull.resource["service.instance.id"] == "boot-1"
    assert pull.resource["kvxferd.endpoint"] == "tcp://h:1"


def test_the_path_is_otlps_own_where_none_is_set() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="kvxferd[tracing] is not installed")
    from kvxferd.telemetry.traces.otlp import traces_url

    assert {traces_url(f"http://h:4318{slash}") for slash in ("", "/")} == {"http://h:4318/v1/traces"}
    assert traces_url("https://h/otlp/v1/traces") == "https://h/otlp/v1/traces"
