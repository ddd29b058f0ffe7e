"""The metric of what became of traced records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from kvxferd.telemetry.traces.tracer import TraceOutcome


class TraceCollector(Collector):
    """Reads the tracer's counts; all zero where nothing is traced."""

    def __init__(self, counts: Callable[[], Mapping[TraceOutcome, int]] = dict) -> None:
        self._counts = counts

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the counter."""
        family = CounterMetricFamily(
            "kvxferd_trace_records",
            "Pulls and publishes of sampled traces: exported as spans, dropped because the queue was full, "
            "or failed because the collector did not take them.",
            labels=["outcome"],
        )
        counts = self._counts()
        for outcome in TraceOutcome:
            family.add_metric([outcome.value], counts.get(outcome, 0))
        yield family
