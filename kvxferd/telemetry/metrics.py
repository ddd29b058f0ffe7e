"""Declares every metric once, in `FAMILIES`: those that count records, and those that are read at a scrape.

Names start with `kvxferd_` and end in their unit. No label holds a request: their number is unbounded, and
the log and the history have them. Engines and peers are labels where an operator switched that on, some
of them at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple, assert_never

import prometheus_client as prometheus
from prometheus_client import core
from prometheus_client.registry import Collector

import kvxferd
from kvxferd.core.limits.table import BUSY_LIMITS
from kvxferd.errors import BUSY_REFUSALS, Code
from kvxferd.ids import Endpoint
from kvxferd.records import (
    PHASES,
    PULL_OUTCOMES,
    PULL_STATES,
    RELEASE_REASONS,
    WAYS,
    HandshakeRecord,
    NodeSnapshot,
    PlacementRecord,
    PullRecord,
    RankSnapshot,
    Record,
    ReleaseRecord,
    ServedRecord,
    TransportsRecord,
)
from kvxferd.telemetry.bounded_labels import BoundedLabels
from kvxferd.telemetry.gauges import (
    ENGINE_STATES,
    PEER_STATES,
    RANK_STATES,
    TRANSFER_STATES,
    TRANSPORT_CLASSES,
    engine_state,
    transport_class,
)
from kvxferd.telemetry.late_timers import Cause, Lateness
from kvxferd.telemetry.log_buffer import LOG_COUNTS
from kvxferd.telemetry.mover_usage import (
    MOVER_STATES,
    NO_MOVERS,
    MoverExit,
    MoverReading,
    MoverUsage,
)
from kvxferd.telemetry.warnings import WarningKind
from kvxferd.ucx_log import REACHES
from kvxferd.wire.endpoint import address_of

# From a few blocks read on the same node to a pull that waits for its deadline; about three per decade.
PULL_BUCKETS_S = (
    *(100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
# Of a phase of a pull: half as many, since each is of nine. 1 and 10 s are what the alerts compare with.
PHASE_BUCKETS_S = (0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0)
# From a prompt read at once to `transfer.max_hold_s`.
HELD_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
# From a block to a prompt of a million tokens: four times as much in each.
SIZE_BUCKETS = tuple(float(4**exponent) for exponent in range(6, 19))  # 4 KiB to 64 GiB
# From an idle loop's to a stall that ends leases.
LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

NO_CODE = "none"  # the `code` label of a pull without an error
# With what pulls fail in practice, and attempts to learn an engine. Their series are there from the start;
# that of another code, of a daemon that breaks the protocol or of another version, begins when it occurs.
PULL_CODES = (
    *(Code.BINDING_STALE, Code.BLOCKS_INVALID, Code.BUSY, Code.COVERAGE_GAP, Code.DEADLINE, Code.DRAINING),
    *(Code.ENGINE_INCOMPLETE, Code.ENGINE_UNKNOWN, Code.GENERATION_STALE, Code.INTERNAL, Code.LAYERS_MISSING),
    *(Code.LAYOUT_INCOMPATIBLE, Code.LEASE_EXPIRED, Code.MOVER_LOST, Code.NIXL_UNAVAILABLE, Code.NONCE_WRONG),
    *(Code.NOT_ALLOWED, Code.NOT_PP_AWARE, Code.PEER_UNREACHABLE, Code.RANK_LOST, Code.REGION_INVALID),
    *(Code.RELEASED, Code.SHAPE_MISMATCH, Code.SOURCE_STALLED, Code.SUSPENDED, Code.TOKENS_NOT_PUBLISHED),
    *(Code.TRANSFER_NOT_READY, Code.TRANSFER_UNKNOWN, Code.TRANSPORT, Code.UNEQUAL_STAGES),
)
HANDSHAKE_CODES = (
    *(Code.BAD_VERSION, Code.BUSY, Code.CANCELLED, Code.DEADLINE, Code.ENGINE_INCOMPLETE),
    *(Code.ENGINE_UNKNOWN, Code.GENERATION_STALE, Code.NOT_ALLOWED, Code.PEER_UNREACHABLE),
)

# Otherwise every counter has a second series with its creation time.
prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Reading:
    """What one scrape reads."""

    node: NodeSnapshot
    is_ready: bool
    warnings: Mapping[WarningKind, int]
    movers: MoverReading
    mover_usage: MoverUsage

    @property
    def ranks(self) -> list[RankSnapshot]:
        """The ranks of all local engines."""
        return [rank for engine in self.node.engines for rank in engine.ranks]

    def lanes(self) -> Counter[tuple[str, str]]:
        """Count ranks by how their movers have connected; each way once for a rank."""
        return Counter(
            pair
            for rank in self.ranks
            for pair in {(lanes.reach, transport_class(lanes.lanes)) for lanes in rank.lanes}
        )


Series = tuple[str, ...]  # the values of a family's labels
Values = float | Mapping[Any, float]  # of the one series, or by its label's value, or by its labels' values

COUNTER, GAUGE, HISTOGRAM = prometheus.Counter, prometheus.Gauge, prometheus.Histogram


class Family(NamedTuple):
    """One metric. `series`: those that are there before anything has happened, with the value 0.

    `read`: its values at a scrape; None: `Metrics.record` and its like count it.
    """

    kind: type[prometheus.Counter | prometheus.Gauge | prometheus.Histogram]
    name: str
    help: str
    labels: Series = ()
    series: tuple[str | Series, ...] = ()
    buckets: tuple[float, ...] = ()
    read: Callable[[Reading], Values] | None = None
    by: str = ""  # "engine" or "peer": it is there where that is switched on, for `BoundedLabels`


def _pull_series() -> Iterator[Series]:
    """Yield how pulls end in practice."""
    yield "delivered", NO_CODE
    yield "cancelled", Code.CANCELLED.value
    yield from (("failed", code.value) for code in PULL_CODES)


def _families_by(kind: str, what: str, labels: Series) -> Iterator[Family]:
    """Yield what is counted for each name that comes from outside."""
    texts = {
        "pulled_bytes": "Bytes of delivered pulls",
        "pull_seconds": "Time of delivered pulls, summed",
        "served_pulls": "Pulls of this node's transfers that were acknowledged",
        "served_bytes": "Bytes of this node's transfers that readers acknowledged",
    }
    pulls = f"Pulls that ended, by {what}."
    yield Family(COUNTER, f"kvxferd_{kind}_pulls", pulls, (*labels, "outcome"), by=kind)
    for name, text in texts.items():
        yield Family(COUNTER, f"kvxferd_{kind}_{name}", f"{text}, by {what}.", labels, by=kind)


# fmt: off
FAMILIES = (
    # What has ended.
    Family(COUNTER, "kvxferd_pulls", "Pulls of local ranks that ended.", ("outcome", "code"),
           tuple(_pull_series())),
    Family(HISTOGRAM, "kvxferd_pull_seconds",
           "From a pull's arrival to its terminal event; not of cancelled ones.", ("outcome",),
           ("delivered", "failed"), PULL_BUCKETS_S),
    Family(HISTOGRAM, "kvxferd_pull_phase_seconds", "Time of a pull in each phase that it entered.",
           ("phase",), PHASES, PHASE_BUCKETS_S),
    Family(HISTOGRAM, "kvxferd_acknowledge_seconds",
           "Of delivered pulls: from the delivery to the reply of the source, which then frees the blocks.",
           buckets=PHASE_BUCKETS_S),
    Family(COUNTER, "kvxferd_pull_retries", "Pulls read a second time because the transport failed.",
           ("outcome",), PULL_OUTCOMES),
    Family(COUNTER, "kvxferd_pulled_bytes", "Bytes of delivered pulls."),
    Family(COUNTER, "kvxferd_pulled_runs", "Contiguous runs read by delivered pulls."),
    Family(HISTOGRAM, "kvxferd_pull_bytes", "Size of each delivered pull of one rank.", buckets=SIZE_BUCKETS),
    Family(COUNTER, "kvxferd_read_bytes", "Bytes of delivered pulls, by the way in which they were read.",
           ("way",), WAYS),
    Family(COUNTER, "kvxferd_progressive_pulls",
           "Delivered pulls that might begin before their transfer was whole."),
    Family(COUNTER, "kvxferd_hidden_bytes",
           "Bytes of delivered progressive pulls that were read before all was known to be ready."),
    Family(HISTOGRAM, "kvxferd_handover_seconds",
           "Of delivered progressive pulls: from all being known to be ready to the terminal event.",
           buckets=PHASE_BUCKETS_S),
    Family(COUNTER, "kvxferd_served_bytes", "Bytes that readers acknowledged to have read from this node."),
    Family(COUNTER, "kvxferd_served_pulls",
           "Pulls, each of one reading rank, that were acknowledged to this node."),
    Family(COUNTER, "kvxferd_handshakes", "Attempts to learn a remote engine.", ("outcome",),
           ("ok", *(code.value for code in HANDSHAKE_CODES))),
    Family(COUNTER, "kvxferd_releases", "Published transfers that are over.", ("why",),
           tuple(reason.value for reason in RELEASE_REASONS)),
    Family(HISTOGRAM, "kvxferd_transfer_held_seconds", "From a publish to its release.",
           buckets=HELD_BUCKETS_S),
    Family(COUNTER, "kvxferd_late_timers", "Timers of the daemon that were late by more than 0.5 s.",
           ("cause",), tuple(Cause)),
    Family(COUNTER, "kvxferd_late_timer_seconds",
           "By how much timers were late that were late by more than 0.5 s, summed.", ("cause",),
           tuple(Cause)),
    Family(HISTOGRAM, "kvxferd_event_loop_lag_seconds",
           "By how much timers of the daemon were late: twice a second, while something happens.",
           buckets=LAG_BUCKETS_S),
    # By pair of engines and by peer, where that is switched on.
    *_families_by("engine", "source and sink engine", ("source", "sink")),
    *_families_by("peer", "peer", ("peer",)),
    # The process.
    Family(GAUGE, "kvxferd_build_info", "1, with the version as a label.", ("version",),
           read=lambda at: {kvxferd.__version__: 1}),
    Family(GAUGE, "kvxferd_ready", "1 while the node takes registrations and pulls.",
           read=lambda at: int(at.is_ready)),
    Family(GAUGE, "kvxferd_draining", "1 while the daemon takes nothing new.",
           read=lambda at: int(at.node.draining)),
    Family(GAUGE, "kvxferd_warnings", "Things to fix on this node, by kind: `kvxferd status` names each.",
           ("kind",), tuple(WarningKind),
           read=lambda at: at.warnings),
    Family(COUNTER, "kvxferd_log_lines_dropped",
           "Log lines for which the queue had no room, or which standard error did not take.",
           read=lambda at: LOG_COUNTS.dropped),
    Family(COUNTER, "kvxferd_log_lines_suppressed", "Log lines over a rate limit.",
           read=lambda at: LOG_COUNTS.suppressed),
    Family(COUNTER, "kvxferd_busy_refusals", "Requests refused as `busy`, by the limit.", ("limit",),
           read=lambda at: {limit: BUSY_REFUSALS[limit] for limit in BUSY_LIMITS}),
    # Engines and peers.
    Family(GAUGE, "kvxferd_engines", "Local engines.", ("state",), ENGINE_STATES,
           read=lambda at: Counter(map(engine_state, at.node.engines))),
    Family(GAUGE, "kvxferd_registered_ranks", "Ranks of local engines.", ("state",), RANK_STATES,
           read=lambda at: Counter(rank.state for rank in at.ranks)),
    # Device names are not labels: they differ between healthy nodes.
    Family(GAUGE, "kvxferd_rank_lanes", "Ranks by how their movers have connected: to whom, and by what.",
           ("reach", "lanes"), tuple(product(REACHES, TRANSPORT_CLASSES)), read=Reading.lanes),
    Family(GAUGE, "kvxferd_registered_bytes", "Memory of the ranks registered here.",
           read=lambda at: sum(rank.bytes for rank in at.ranks)),
    Family(GAUGE, "kvxferd_peers", "Other daemons that are known.", ("state",), PEER_STATES,
           read=lambda at: Counter(peer.state for peer in at.node.peers)),
    # Transfers and pulls that go on.
    Family(GAUGE, "kvxferd_live_leases", "Transfers published here and not released.", ("state",),
           TRANSFER_STATES, read=lambda at: at.node.transfer_states),
    Family(GAUGE, "kvxferd_published_bytes",
           "Memory here that published transfers hold until their release.",
           read=lambda at: at.node.published_bytes),
    Family(GAUGE, "kvxferd_oldest_published_seconds",
           "Age of the oldest published transfer that is not released.",
           read=lambda at: at.node.oldest_published_s),
    Family(GAUGE, "kvxferd_running_pulls",
           "Pulls of local ranks that have not ended, by what they wait for; in-doubt ones have failed.",
           ("phase",), PULL_STATES, read=lambda at: at.node.pull_phases),
    Family(GAUGE, "kvxferd_quarantined_pulls", "Ended pulls whose blocks may still be written.",
           read=lambda at: at.node.num_quarantined),
    Family(GAUGE, "kvxferd_quarantined_bytes", "Memory that ended pulls may still write.",
           read=lambda at: at.node.quarantined_bytes),
    Family(GAUGE, "kvxferd_limit", "The limits of this node.", ("limit",),
           read=lambda at: {one.name: one.limit for one in at.node.limits}),
    Family(GAUGE, "kvxferd_limit_used",
           "What is used of each limit; of one for each engine, rank or peer, by the one that uses most.",
           ("limit",), read=lambda at: {one.name: one.used for one in at.node.limits}),
    # Movers.
    Family(GAUGE, "kvxferd_movers", "Mover processes; those that are ready have no rank.", ("state",),
           MOVER_STATES, read=lambda at: at.movers.num_by_state),
    Family(GAUGE, "kvxferd_retired_movers", "Movers that get nothing new and are not dead yet.",
           read=lambda at: at.node.num_retired_movers),
    Family(COUNTER, "kvxferd_mover_exits", "Movers that ended, by why.", ("cause",), tuple(MoverExit),
           read=lambda at: at.movers.exits),
    Family(COUNTER, "kvxferd_mover_cpu_seconds",
           "Processor time of all mover processes and their forkserver.",
           read=lambda at: at.mover_usage.cpu_s),
    Family(COUNTER, "kvxferd_mover_wait_seconds",
           "For how long movers were ready to run, and the node gave them no processor; summed.",
           read=lambda at: at.mover_usage.waited_s),
    Family(GAUGE, "kvxferd_mover_memory_bytes",
           "Resident memory of all mover processes and their forkserver, without that of engines and files.",
           read=lambda at: at.mover_usage.memory_bytes),
)
# fmt: on


def _series_by(kind: str, labels: Series) -> Iterator[Series]:
    """Yield the name and labels of each series for one name from outside."""
    for family in FAMILIES:
        if family.by == kind and "outcome" in family.labels:
            yield from ((family.name, *labels, outcome) for outcome in PULL_OUTCOMES)
        elif family.by == kind:
            yield (family.name, *labels)


class Scrape(Collector):
    """All families at one moment: those that are counted, and those that are read of a node."""

    def __init__(self, counted: Collector, reading: Reading) -> None:
        self._counted = counted
        self._reading = reading

    def collect(self) -> Iterator[core.Metric]:
        """Yield each with its values; a series without one has 0."""
        yield from self._counted.collect()
        for family in FAMILIES:
            if family.read is None:
                continue
            of = core.CounterMetricFamily if family.kind is COUNTER else core.GaugeMetricFamily
            made = of(family.name, family.help, labels=family.labels)
            values = family.read(self._reading)
            by_series = values if isinstance(values, Mapping) else {(): values}
            for series in dict.fromkeys([*family.series, *by_series]):
                made.add_metric([series] if isinstance(series, str) else series, by_series.get(series, 0))
            yield made


class Metrics:
    """One daemon's metrics, in a registry of its own."""

    def __init__(
        self,
        *,
        by_engine: bool = False,
        by_peer: bool = False,
        count_warnings: Callable[[], Mapping[WarningKind, int]] = dict,
        is_ready: Callable[[], bool] = lambda: False,
        movers: Callable[[], MoverReading] = lambda: NO_MOVERS,
    ) -> None:
        """`by_engine`, `by_peer`: with series for each pair of engines, for each peer."""
        self.registry = registry = prometheus.CollectorRegistry()
        self._count_warnings, self._is_ready = count_warnings, is_ready
        self._movers = movers
        self._mover_usage = MoverUsage()
        self._families: dict[str, Any] = {}
        # Prometheus' rate() does not count a series that first appears at 1. Kept here, because looking one
        # up in its family takes longer than counting.
        self._series: dict[Series, Any] = {}
        self._bounded: dict[str, BoundedLabels] = {
            kind: BoundedLabels(partial(self._begin, kind), partial(self._end, kind))
            for kind, is_on in (("engine", by_engine), ("peer", by_peer))
            if is_on
        }
        for family in FAMILIES:
            if family.read is not None or (family.by and family.by not in self._bounded):
                continue
            more: dict[str, Any] = {"buckets": family.buckets} if family.buckets else {}
            self._families[family.name] = family.kind(
                family.name, family.help, family.labels, registry=registry, **more
            )
            for series in family.series:
                self._of(family.name, *([series] if isinstance(series, str) else series))
        prometheus.ProcessCollector(registry=registry)

    def record(self, record: Record) -> None:
        """Count a record."""
        match record:
            case PullRecord():
                self._record_pull(record)
            case HandshakeRecord():
                self._of("kvxferd_handshakes", record.outcome).inc()
            case ReleaseRecord():
                self._of("kvxferd_releases", record.why.value).inc()
                self._of("kvxferd_transfer_held_seconds").observe(record.held_s)
            case PlacementRecord() | TransportsRecord():
                pass  # logged, and in the snapshot
            case _:
                assert_never(record)

    def record_served(self, served: ServedRecord) -> None:
        """Count what a reading rank acknowledged."""
        self._of("kvxferd_served_bytes").inc(served.bytes)
        self._of("kvxferd_served_pulls").inc()
        for kind, labels in self._named(served.source, served.sink, served.peer):
            self._of(f"kvxferd_{kind}_served_pulls", *labels).inc()
            self._of(f"kvxferd_{kind}_served_bytes", *labels).inc(served.bytes)

    def record_loop_lag(self, lag_s: float) -> None:
        """Count by how much one of the daemon's timers was late."""
        self._of("kvxferd_event_loop_lag_seconds").observe(lag_s)

    def record_late_timer(self, lateness: Lateness) -> None:
        """Count a late timer."""
        self._of("kvxferd_late_timers", lateness.cause.value).inc()
        self._of("kvxferd_late_timer_seconds", lateness.cause.value).inc(lateness.late_s)

    def scrape(self, node: NodeSnapshot) -> Scrape:
        """Return all metrics of a node now."""
        movers = self._movers()
        self._mover_usage.update(movers.forkserver_pid, movers.pids)
        reading = Reading(node, self._is_ready(), self._count_warnings(), movers, self._mover_usage)
        return Scrape(self.registry, reading)

    def render(self, node: NodeSnapshot) -> bytes:
        """Return them in Prometheus' text format."""
        return prometheus.generate_latest(self.scrape(node))

    def _of(self, name: str, *labels: str) -> Any:
        """Return a series of a family that counts records; a new one begins at 0."""
        if (found := self._series.get((name, *labels))) is None:
            family = self._families[name]
            found = self._series[(name, *labels)] = family.labels(*labels) if labels else family
        return found

    def _named(self, source: str, sink: str, peer: str) -> Iterator[tuple[str, Series]]:
        """Yield the labels of what is switched on."""
        if engines := self._bounded.get("engine"):
            yield "engine", engines.of(source, sink)
        if peers := self._bounded.get("peer"):
            yield "peer", peers.of(address_of(Endpoint(peer)).removeprefix("tcp://"))

    def _begin(self, kind: str, labels: Series) -> None:
        """Make every series of these labels."""
        for series in _series_by(kind, labels):
            self._of(*series)

    def _end(self, kind: str, labels: Series) -> None:
        for name, *values in _series_by(kind, labels):
            self._families[name].remove(*values)
            del self._series[(name, *values)]

    def _record_pull(self, record: PullRecord) -> None:
        for kind, labels in self._named(record.source, record.sink, record.peer):
            self._of(f"kvxferd_{kind}_pulls", *labels, record.outcome).inc()
            if record.outcome == "delivered":
                self._of(f"kvxferd_{kind}_pulled_bytes", *labels).inc(max(record.bytes, 0))
                self._of(f"kvxferd_{kind}_pull_seconds", *labels).inc(record.total_s)
        code = NO_CODE if record.code is None else record.code.value
        self._of("kvxferd_pulls", record.outcome, code).inc()
        if record.outcome != "cancelled":
            self._of("kvxferd_pull_seconds", record.outcome).observe(record.total_s)
        if record.retried:
            self._of("kvxferd_pull_retries", record.outcome).inc()
        for phase, elapsed_s in record.phases_s.items():
            self._of("kvxferd_pull_phase_seconds", phase).observe(elapsed_s)
        if record.acknowledge_s is not None:
            self._of("kvxferd_acknowledge_seconds").observe(record.acknowledge_s)
        if record.outcome != "delivered":
            return
        self._of("kvxferd_pulled_bytes").inc(record.bytes)
        self._of("kvxferd_pulled_runs").inc(record.runs)
        self._of("kvxferd_pull_bytes").observe(record.bytes)
        for way, num_bytes in record.ways.items():
            self._of("kvxferd_read_bytes", way).inc(num_bytes)
        if record.progressive:
            self._of("kvxferd_progressive_pulls").inc()
            self._of("kvxferd_hidden_bytes").inc(record.hidden_bytes)
            if record.handover_s is not None:
                self._of("kvxferd_handover_seconds").observe(record.handover_s)
