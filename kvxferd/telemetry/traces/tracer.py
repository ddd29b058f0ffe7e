"""The queue between the event loop and the thread that exports spans.

The loop pays for one append. Spans are made, encoded and sent by the thread, which sleeps between two
batches, so that it takes little of the interpreter from the loop. What does not fit is dropped and counted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum

import structlog

from kvxferd.core.limits.fair_share import FairShare
from kvxferd.telemetry.traces.spans import Span, TracedRecord, spans_of
from kvxferd.threads import start_thread

log = structlog.get_logger()

# A pull is 9 spans, and making and encoding one takes 75 us of the interpreter, which the loop may have to
# wait for: 16 records every quarter of a second are 64 a second, and 4 % of a core. The queue holds eight
# seconds of that, 1 MiB.
MAX_QUEUED = 512
MAX_BATCH = 16
INTERVAL_S = 0.25
CLOSE_S = 2.0  # for what is queued at the end

Export = Callable[[Sequence[Span]], str]


class TraceOutcome(StrEnum):
    """What became of a record that was to be exported."""

    EXPORTED = "exported"
    DROPPED = "dropped"  # the queue was full
    FAILED = "failed"  # the collector did not take it


class Tracer:
    """Exports the spans of traced records, in a thread of its own."""

    def __init__(
        self,
        export: Export,
        close_export: Callable[[], None],
        call_in_loop: Callable[[Callable[[], None]], object],
    ) -> None:
        """`export` sends spans and returns why it could not, or ""; only the thread calls it."""
        self._export = export
        self._close_export = close_export
        self._call_in_loop = call_in_loop
        self._lock = threading.Lock()  # of what follows; held for microseconds
        self._queue: deque[TracedRecord] = deque()
        # One engine whose requests are all sampled must not crowd out the others'.
        self._share = FairShare(MAX_QUEUED)
        self.counts = dict.fromkeys(TraceOutcome, 0)
        self._wake, self._stop = threading.Event(), threading.Event()
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="kvxferd-traces", daemon=True)

    def start(self) -> None:
        """Start the thread. Raises ConfigError where the system has none."""
        start_thread(self._thread, "export traces")

    def add(self, record: TracedRecord) -> None:
        """Queue a stamped record with a traceparent. Never waits for the thread's I/O."""
        with self._lock:
            if not self._share.acquire(_engine_of(record)):
                self.counts[TraceOutcome.DROPPED] += 1
                return
            self._queue.append(record)
        if not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """Export what is queued, for `CLOSE_S` at most. Blocks for so long; not on the loop's thread."""
        self._stop.set()
        self._wake.set()
        self._thread.join(CLOSE_S)
        self._close_export()  # ends a request that waits for the collector

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait()
            self._stop.wait(INTERVAL_S)  # for more records, and for the loop
            self._export_batch()
        deadline = time.monotonic() + CLOSE_S
        while time.monotonic() < deadline and self._export_batch():
            pass

    def _export_batch(self) -> int:
        """Export some records. Return how many are left."""
        with self._lock:
            batch = [self._queue.popleft() for _ in range(min(MAX_BATCH, len(self._queue)))]
            for record in batch:
                self._share.release(_engine_of(record))
            num_left = len(self._queue)
            if not num_left:
                self._wake.clear()
        if batch:
            failure = self._try_export(batch)
            with self._lock:
                self.counts[TraceOutcome.FAILED if failure else TraceOutcome.EXPORTED] += len(batch)
            self._report(failure)
        return num_left

    def _try_export(self, batch: list[TracedRecord]) -> str:
        try:
            return self._export([span for record in batch for span in spans_of(record)])
        except Exception as error:  # the exporter's own; the thread goes on with the next batch
            return f"{type(error).__name__}: {error}"

    def _report(self, failure: str) -> None:
        """Log the beginning and the end of failures, on the loop's thread."""
        if bool(failure) == self._is_failing:
            return
        self._is_failing = bool(failure)
        with suppress(RuntimeError):  # the loop is closed
            if failure:
                self._call_in_loop(lambda: log.warning("traces not exported", reason=failure[:500]))
            else:
                self._call_in_loop(lambda: log.info("traces exported again"))


def _engine_of(record: TracedRecord) -> str:
    """Return the engine of this node whose request it is."""
    return getattr(record, "sink", "") or getattr(record, "engine_id", "")
