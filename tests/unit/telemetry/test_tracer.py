"""The queue and its thread: bounded, fair, and never in the caller's way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvxferd.telemetry.traces import tracer as module
from kvxferd.telemetry.traces.spans import Span
from kvxferd.telemetry.traces.tracer import MAX_BATCH, MAX_QUEUED, TraceOutcome, Tracer
from tests.unit.telemetry.test_spans import pull_record

LIMIT_S = 30.0


class Exported:
    """An exporter that may be held up, may refuse, and keeps what it was given."""

    def __init__(self) -> None:
        self.batches: list[Sequence[Span]] = []
        self.go, self.busy, self.done = threading.Event(), threading.Event(), threading.Event()
        self.failure: str | Exception = ""
        self.threads: set[int] = set()
        self.closed = 0
        self.go.set()

    def export(self, spans: Sequence[Span]) -> str:
        self.busy.set()
        assert self.go.wait(LIMIT_S)
        self.threads.add(threading.get_ident())
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
def calls() -> list[Callable[[], None]]:
    return []


@pytest.fixture
def tracer(exported: Exported, calls: list[Callable[[], None]]) -> Iterator[Tracer]:
    tracer = Tracer(exported.export, exported.close, calls.append)
    tracer.start()
    yield tracer
    exported.go.set()
    tracer.close()
    assert not tracer._thread.is_alive()


def test_a_record_is_exported_by_the_thread(tracer: Tracer, exported: Exported) -> None:
    tracer.add(pull_record())
    assert exported.done.wait(LIMIT_S)
    tracer.close()
    assert [span.name for batch in exported.batches for span in batch] == ["kvxferd.pull"]
    assert exported.threads == {tracer._thread.ident}
    assert tracer.counts == {"exported": 1, "dropped": 0, "failed": 0}


def test_while_the_collector_is_silent_the_queue_is_bounded_and_one_engine_leaves_room(
    tracer: Tracer, exported: Exported
) -> None:
    exported.go.clear()
    tracer.add(pull_record(sink="loud"))
    assert exported.busy.wait(LIMIT_S)  # the thread waits for the collector: adding does not
    for _ in range(3 * MAX_QUEUED):
        tracer.add(pull_record(sink="loud"))
    assert len(tracer._queue) == MAX_QUEUED - MAX_QUEUED // 8
    for _ in range(10):
        tracer.add(pull_record(sink="quiet"))
    dropped = tracer.counts[TraceOutcome.DROPPED]
    assert dropped == 2 * MAX_QUEUED + MAX_QUEUED // 8
    exported.go.set()
    tracer.close()
    sinks = [span.attributes["kvxferd.sink"] for batch in exported.batches for span in batch]
    assert sinks.count("quiet") == 10
    assert max(map(len, exported.batches)) <= MAX_BATCH
    assert sum(tracer.counts.values()) == 1 + 3 * MAX_QUEUED + 10
    assert tracer._share.held == 0


@pytest.mark.parametrize("failure", ["refused", ValueError("a span that cannot be encoded")])
def test_failures_are_counted_and_logged_once(
    tracer: Tracer, exported: Exported, calls: list[Any], failure: str | Exception
) -> None:
    exported.failure = failure
    for _ in range(3):
        exported.done.clear()
        tracer.add(pull_record())
        assert exported.done.wait(LIMIT_S)
    exported.failure = ""
    tracer.add(pull_record())
    tracer.close()
    assert tracer.counts[TraceOutcome.FAILED] == 3
    assert tracer.counts[TraceOutcome.EXPORTED] == 1
    assert len(calls) == 2  # one line when they begin, one when they end


def test_the_end_waits_for_a_silent_collector_no_longer_than_it_may(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.05)
    exported.go.clear()
    tracer = Tracer(exported.export, exported.close, lambda call: None)
    tracer.start()
    tracer.add(pull_record())
    assert exported.busy.wait(LIMIT_S)
    tracer.close()  # ends the request
    assert exported.closed == 1
    tracer._thread.join(LIMIT_S)
    assert not tracer._thread.is_alive()
