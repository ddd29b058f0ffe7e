"""The connector's stats in vLLM's log line and in its ``/metrics``."""

from __future__ import annotations

import copy
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvxferd.errors import Code
from kvxferd.integrations.vllm.session import stats

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_BYTES = tuple(float(1 << power) for power in range(14, 37, 2))  # 16 KiB to 64 GiB
_RUNS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)

# The key in stats, the metric's name and help.
_HISTOGRAMS = (
    ("pull_s", "vllm:kvxferd_pull_seconds", "From order to Delivered, as the worker saw it.", _SECONDS),
    ("wire_s", "vllm:kvxferd_wire_seconds", "First read posted to last read done.", _SECONDS),
    ("bytes", "vllm:kvxferd_pull_bytes", "Bytes of each delivered pull of one rank.", _BYTES),
    ("runs", "vllm:kvxferd_pull_runs", "Contiguous runs of each delivered pull of one rank.", _RUNS),
)
_COUNTERS = (
    ("pulls_failed", "vllm:kvxferd_pulls_failed", "Pulls of one rank that failed, by the daemon's code."),
    ("publishes_failed", "vllm:kvxferd_publishes_failed", "Requests that could not be published, by code."),
    ("released_unread", "vllm:kvxferd_released_unread", "Published requests released before they were read."),
)


class KvxferdStats(KVConnectorStats):  # type: ignore[misc]
    """One interval of one engine: `stats.empty()` as a KVConnectorStats."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or stats.empty())

    def reset(self) -> None:
        """Begin a new interval."""
        self.data = stats.empty()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another's interval to this one."""
        stats.add(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the figures that vLLM logs for the interval."""
        return stats.summary(self.data)

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return stats.is_empty(self.data)

    def __copy__(self) -> KvxferdStats:
        return KvxferdStats(copy.deepcopy(self.data))


class KvxferdPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The stats as Prometheus metrics, with vLLM's labels."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._histograms = {
            key: create_metric_per_engine(
                self._histogram_cls(name=name, documentation=text, buckets=buckets, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for key, name, text, buckets in _HISTOGRAMS
        }
        self._counters = {
            key: self._counter_cls(name=name, documentation=text, labelnames=[*labelnames, "code"])
            for key, name, text in _COUNTERS
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record an interval."""
        for key, histograms in self._histograms.items():
            for value in transfer_stats_data[key]:
                histograms[engine_idx].observe(value)
        labels = self.per_engine_labelvalues[engine_idx]
        for key, counter in self._counters.items():
            for code, count in transfer_stats_data[key].items():
                # The codes are the daemon's closed list, so the label stays bounded.
                counter.labels(*labels, Code(code).value).inc(count)
