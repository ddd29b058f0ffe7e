"""The queue between the event loop and the thread that exports spans.

The loop pays for one append. Spans are made, encoded and sent by the thread, which sleeps between two
batches, so that it takes little of the interpreter from the loop. What does not fit is dropped: a trace is a
sample.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import structlog

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


class Tracer:
    """Exports the spans of traced records, in a thread of its own."""

    def __init__(self, export: Export, close_export: Callable[[], None]) -> None:
        """`export` sends spans and returns why it could not, or ""; only the thread calls it."""
        self._export = export
        self._close_export = close_export
        self._queue: deque[TracedRecord] = deque()
        self._num_dropped = 0
        self._wake, self._stop = threading.Event(), threading.Event()
        self._failure = ""  # of the last batch
        self._thread = threading.Thread(target=self._run, name="kvxferd-traces", daemon=True)

    def start(self) -> None:
        """Start the thread. Raises ConfigError where the system has none."""
        start_thread(self._thread, "export traces")

    def add(self, record: TracedRecord) -> None:
        """Queue a stamped record with a traceparent, or drop it. Never waits for the thread."""
        if len(self._queue) < MAX_QUEUED:
            self._queue.append(record)
            self._wake.set()
        else:
            self._num_dropped += 1

    def close(self) -> None:
        """Export what is queued, for `CLOSE_S` at most. Blocks for so long; not on the loop's thread."""
        self._stop.set()
        self._wake.set()
        self._thread.join(CLOSE_S)
        self._close_export()  # ends a request that waits for the collector

    def _run(self) -> None:
        while self._queue or not self._stop.is_set():
            self._wake.wait()
            self._wake.clear()
            while self._queue:
                self._stop.wait(INTERVAL_S)  # for more records, and for the loop
                self._export_batch()

    def _export_batch(self) -> None:
        batch = [self._queue.popleft() for _ in range(min(MAX_BATCH, len(self._queue)))]
        try:
            failure = self._export([span for record in batch for span in spans_of(record)])
        except Exception as error:  # the exporter's own; the thread goes on with the next batch
            failure = f"{type(error).__name__}: {error}"
        if failure and not self._failure:
            log.warning("traces not exported", reason=failure[:500])
        elif self._failure and not failure:
            log.info("traces exported again")
        self._failure = failure
        if self._num_dropped:
            num_dropped, self._num_dropped = self._num_dropped, 0
            log.info("traces dropped", records=num_dropped)
