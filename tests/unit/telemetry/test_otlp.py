"""Spans over OTLP: what a collector gets, and collectors that refuse or are gone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvxferd.ids import BootId, Endpoint
from kvxferd.telemetry.traces.spans import spans_of
from tests.support.trace_receiver import TraceReceiver
from tests.support.traced_records import OWN, PARENT, TRACE, pull_record

pytest.importorskip("opentelemetry.sdk", reason="kvxferd[tracing] is not installed")

from kvxferd.telemetry.traces.otlp import OtlpExporter, traces_url


@pytest.fixture
def receiver() -> Iterator[TraceReceiver]:
    receiver = TraceReceiver()
    yield receiver
    receiver.close()


def exporter_to(url: str) -> OtlpExporter:
    return OtlpExporter(url, BootId("boot-1"), Endpoint(f"tcp://h:1#{'ab' * 32}"))


def test_what_the_collector_gets(receiver: TraceReceiver) -> None:
    exporter = exporter_to(receiver.endpoint)
    failed = pull_record(
        outcome="failed", code=None, message="é\U0001f600", failed_phase="grant", bytes=1 << 40
    )
    assert exporter.export(list(spans_of(failed))) == ""
    exporter.close()
    pull, grant = receiver.spans
    assert (pull.trace_id, pull.span_id, pull.parent_id) == (TRACE, OWN, PARENT)
    assert (pull.kind, pull.is_error, pull.message) == ("CLIENT", True, "failed: é\U0001f600")
    assert pull.attributes["kvxferd.bytes"] == 1 << 40
    assert pull.end_ns - pull.start_ns == 2 * 10**9
    assert (grant.parent_id, grant.is_error) == (OWN, True)
    assert pull.resource["service.name"] == "kvxferd"
    assert pull.resource["service.instance.id"] == "boot-1"
    assert pull.resource["kvxferd.endpoint"] == "tcp://h:1"


def test_a_collector_that_refuses_and_one_that_is_gone(receiver: TraceReceiver) -> None:
    receiver.status = 400
    exporter = exporter_to(receiver.endpoint)
    assert "does not take them" in exporter.export(list(spans_of(pull_record())))
    receiver.status = 200
    assert exporter.export(list(spans_of(pull_record()))) == ""
    exporter.close()


@pytest.mark.parametrize(
    ("setting", "url"),
    [
        ("http://h:4318", "http://h:4318/v1/traces"),
        ("http://h:4318/", "http://h:4318/v1/traces"),
        ("https://h/otlp/v1/traces", "https://h/otlp/v1/traces"),
    ],
)
def test_the_path_is_otlps_own_where_none_is_set(setting: str, url: str) -> None:
    assert traces_url(setting) == url
