"""Declares every metric once.

Names start with `kvxferd_` and end in their unit. No label holds a request, an engine or a peer: their
number is unbounded. The log and the history have those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import assert_never

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

import kvxferd
from kvxferd.core.limits.checks import BUSY_LIMITS
from kvxferd.errors import BUSY_REFUSALS, Code
from kvxferd.records import (
    PHASES,
    PULL_OUTCOMES,
    RELEASE_REASONS,
    WAYS,
    HandshakeRecord,
    NodeSnapshot,
    PlacementRecord,
    PullRecord,
    Record,
    ReleaseRecord,
    ServedRecord,
    TopologyRecord,
    TransportsRecord,
)
from kvxferd.telemetry.bounded_series import EngineAndPeerCollector
from kvxferd.telemetry.gauges import PLACEMENTS, gauges_of
from kvxferd.telemetry.late_timers import Cause, Lateness
from kvxferd.telemetry.log_queue import LOG_COUNTS
from kvxferd.telemetry.mover_usage import NO_MOVERS, MoverCollector, MoverReading
from kvxferd.telemetry.traces.collector import TraceCollector
from kvxferd.telemetry.warnings.warning_watch import WarningCollector

# From a few blocks read on the same node to a pull that waits for its deadline; about three per decade.
PULL_BUCKETS_S = (
    *(100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
# From a prompt read at once to `transfer.max_hold_s`.
HELD_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

# From a block to a prompt of a million tokens: four times as much in each.
SIZE_BUCKETS = tuple(float(4**exponent) for exponent in range(6, 19))  # 4 KiB to 64 GiB

# From an idle loop's to a stall that ends leases.
LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

# From TCP on a busy machine to the memory of a GPU.
SPEED_BUCKETS = (0.1e9, 0.3e9, 1e9, 3e9, 10e9, 30e9, 100e9, 300e9, 1e12, 3e12)

NO_CODE = "none"  # the `code` label of a pull without an error

# Otherwise every counter has a second series with its creation time.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class SnapshotCollector(Collector):
    """Computes gauges from a snapshot that is made at each scrape."""

    def __init__(self, snapshot: Callable[[], NodeSnapshot]) -> None:
        self._snapshot = snapshot
        self.given_snapshot: NodeSnapshot | None = None  # set for one `render`

    def collect(self) -> Iterator[prometheus_client.core.GaugeMetricFamily]:
        """Yield every gauge with its current value."""
        return gauges_of(self.given_snapshot or self._snapshot())


class LogCollector(Collector):
    """Counts the lines that this process did not log."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield both counters."""
        yield CounterMetricFamily(
            "kvxferd_log_lines_dropped",
            "Log lines for which the queue had no room, or which standard error did not take.",
            value=LOG_COUNTS.dropped,
        )
        yield CounterMetricFamily(
            "kvxferd_log_lines_suppressed", "Log lines over a rate limit.", value=LOG_COUNTS.suppressed
        )


class BusyCollector(Collector):
    """Counts what this process refused because a limit was reached."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the counter of each limit."""
        family = CounterMetricFamily(
            "kvxferd_busy_refusals", "Requests refused as `busy`, by the limit.", labels=["limit"]
        )
        for limit in BUSY_LIMITS:
            family.add_metric([limit], BUSY_REFUSALS[limit])
        yield family


class Metrics:
    """One daemon's metrics, in a registry of its own."""

    def __init__(
        self,
        snapshot: Callable[[], NodeSnapshot],
        warnings: WarningCollector | None = None,
        movers: Callable[[], MoverReading] = lambda: NO_MOVERS,
        engines_and_peers: EngineAndPeerCollector | None = None,
        traces: TraceCollector | None = None,
    ) -> None:
        """`engines_and_peers`: the series for each engine pair and peer; None: there are none."""
        self.registry = registry = CollectorRegistry()
        self._pulls = Counter(
            "kvxferd_pulls", "Pulls of local ranks that ended.", ["outcome", "code"], registry=registry
        )
        self._retries = Counter(
            "kvxferd_pull_retries",
            "Pulls read a second time because the transport failed.",
            ["outcome"],
            registry=registry,
        )
        self._pulled_bytes = Counter("kvxferd_pulled_bytes", "Bytes of delivered pulls.", registry=registry)
        self._pulled_runs = Counter(
            "kvxferd_pulled_runs", "Contiguous runs read by delivered pulls.", registry=registry
        )
        self._pull_bytes = Histogram(
            "kvxferd_pull_bytes", "Size of each delivered pull of one rank.",
            buckets=SIZE_BUCKETS, registry=registry,
        )  # fmt: skip
        self._read_bytes = Counter(
            "kvxferd_read_bytes", "Bytes of delivered pulls, by the way in which they were read.", ["way"],
            registry=registry,
        )  # fmt: skip
        self._progressive_pulls = Counter(
            "kvxferd_progressive_pulls", "Delivered pulls that might begin before their transfer was whole.",
            registry=registry,
        )  # fmt: skip
        self._hidden_bytes = Counter(
            "kvxferd_hidden_bytes",
            "Bytes of delivered progressive pulls that were read before all was known to be ready.",
            registry=registry,
        )
        self._handover_seconds = Histogram(
            "kvxferd_handover_seconds",
            "Of delivered progressive pulls: from all being known to be ready to the terminal event.",
            buckets=PULL_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self._served_bytes = Counter(
            "kvxferd_served_bytes", "Bytes that readers acknowledged to have read from this node.",
            registry=registry,
        )  # fmt: skip
        self._served_pulls = Counter(
            "kvxferd_served_pulls", "Pulls, each of one reading rank, that were acknowledged to this node.",
            registry=registry,
        )  # fmt: skip
        self._handshakes = Counter(
            "kvxferd_handshakes", "Attempts to learn a remote engine.", ["outcome"], registry=registry
        )
        self._releases = Counter(
            "kvxferd_releases", "Published transfers that are over.", ["why"], registry=registry
        )
        self._pull_seconds = Histogram(
            "kvxferd_pull_seconds", "From a pull's arrival to its terminal event.", ["outcome"],
            buckets=PULL_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self._phase_seconds = Histogram(
            "kvxferd_pull_phase_seconds", "Time of a pull in each phase that it entered.", ["phase"],
            buckets=PULL_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self._handshake_seconds = Histogram(
            "kvxferd_handshake_seconds", "Time to learn a remote engine, or to be refused.",
            buckets=PULL_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self._held_seconds = Histogram(
            "kvxferd_transfer_held_seconds", "From a publish to its release.",
            buckets=HELD_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self._probe_speed = Histogram(
            "kvxferd_probe_bytes_per_second", "Speed of the read that proved a rank's memory.", ["placement"],
            buckets=SPEED_BUCKETS, registry=registry,
        )  # fmt: skip
        self._late_timers = Counter(
            "kvxferd_late_timers", "Timers of the daemon that were late by more than 0.5 s.", ["cause"],
            registry=registry,
        )  # fmt: skip
        self._late_timer_seconds = Counter(
            "kvxferd_late_timer_seconds",
            "By how much timers were late that were late by more than 0.5 s, summed.",
            ["cause"],
            registry=registry,
        )
        self._loop_lag = Histogram(
            "kvxferd_event_loop_lag_seconds", "By how much timers of the daemon were late, twice a second.",
            buckets=LAG_BUCKETS_S, registry=registry,
        )  # fmt: skip
        build = Gauge("kvxferd_build_info", "1, with the version as a label.", ["version"], registry=registry)
        build.labels(kvxferd.__version__).set(1)
        self._gauges = SnapshotCollector(snapshot)
        registry.register(self._gauges)
        registry.register(LogCollector())
        registry.register(BusyCollector())
        registry.register(MoverCollector(movers))
        self._engines_and_peers = engines_and_peers
        if engines_and_peers is not None:
            registry.register(engines_and_peers)
        registry.register(warnings or WarningCollector())
        registry.register(traces or TraceCollector())
        prometheus_client.ProcessCollector(registry=registry)
        self._start_at_zero()

    def record(self, record: Record) -> None:
        """Count a record."""
        match record:
            case PullRecord():
                self._record_pull(record)
            case HandshakeRecord():
                self._handshakes.labels(record.outcome).inc()
                self._handshake_seconds.observe(record.elapsed_s)
            case ReleaseRecord():
                self._releases.labels(record.why.value).inc()
                self._held_seconds.observe(record.held_s)
            case TopologyRecord():
                pass  # once for each rank and remote engine: only logged
            case PlacementRecord():
                if record.proved:
                    self._probe_speed.labels(record.placement).observe(record.gigabytes_per_s * 1e9)
            case TransportsRecord():
                pass  # a gauge
            case _:
                assert_never(record)

    def record_served(self, served: ServedRecord) -> None:
        """Count what a reading rank acknowledged."""
        self._served_bytes.inc(served.bytes)
        self._served_pulls.inc()
        if self._engines_and_peers is not None:
            self._engines_and_peers.record_served(served)

    def record_loop_lag(self, lag_s: float) -> None:
        """Count by how much one of the daemon's timers was late."""
        self._loop_lag.observe(lag_s)

    def record_late_timer(self, lateness: Lateness) -> None:
        """Count a late timer."""
        self._late_timers.labels(lateness.cause.value).inc()
        self._late_timer_seconds.labels(lateness.cause.value).inc(lateness.late_s)

    def render(self, node: NodeSnapshot | None = None) -> bytes:
        """Return all metrics in Prometheus' text format; gauges from `node`, or else a new snapshot."""
        self._gauges.given_snapshot = node
        try:
            return prometheus_client.generate_latest(self.registry)
        finally:
            self._gauges.given_snapshot = None

    def _record_pull(self, record: PullRecord) -> None:
        if self._engines_and_peers is not None:
            self._engines_and_peers.record_pull(record)
        code = NO_CODE if record.code is None else record.code.value
        if record.outcome == "delivered":
            self._delivered.inc()
            self._delivered_seconds.observe(record.total_s)
        else:
            self._pulls.labels(record.outcome, code).inc()
            self._pull_seconds.labels(record.outcome).observe(record.total_s)
        if record.retried:
            self._retries.labels(record.outcome).inc()
        for phase, elapsed_s in record.phases_s.items():
            self._seconds_by_phase[phase].observe(elapsed_s)
        if record.outcome == "delivered":
            self._pulled_bytes.inc(record.bytes)
            self._pull_bytes.observe(record.bytes)
            self._pulled_runs.inc(record.runs)
            for way, num_bytes in record.ways.items():
                self._read_bytes.labels(way).inc(num_bytes)
            if record.progressive:
                self._record_handover(record)

    def _record_handover(self, record: PullRecord) -> None:
        self._progressive_pulls.inc()
        self._hidden_bytes.inc(record.hidden_bytes)
        if record.handover_s is not None:
            self._handover_seconds.observe(record.handover_s)

    def _start_at_zero(self) -> None:
        # Prometheus' rate() does not count a series that first appears at 1.
        # Kept, because looking up a series takes longer than counting.
        self._delivered = self._pulls.labels("delivered", NO_CODE)
        self._pulls.labels("cancelled", Code.CANCELLED.value)
        for code in Code:
            # A pull, or a handshake, fails with any code that the other daemon names.
            self._pulls.labels("failed", code.value)
            self._handshakes.labels(code.value)
        self._handshakes.labels("ok")
        for reason in RELEASE_REASONS:
            self._releases.labels(reason.value)
        for way in WAYS:
            self._read_bytes.labels(way)
        for outcome in PULL_OUTCOMES:
            self._pull_seconds.labels(outcome)
            self._retries.labels(outcome)
        self._delivered_seconds = self._pull_seconds.labels("delivered")
        for placement in PLACEMENTS:
            self._probe_speed.labels(placement)
        for cause in Cause:
            self._late_timers.labels(cause.value)
            self._late_timer_seconds.labels(cause.value)
        self._seconds_by_phase = {phase: self._phase_seconds.labels(phase) for phase in PHASES}
