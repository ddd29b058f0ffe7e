"""Gauges of the node's current state, counted from a snapshot at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product

from prometheus_client.core import GaugeMetricFamily

from kvxferd.core.ranks.rank import RankState
from kvxferd.records import (
    PULL_STATES,
    EngineSnapshot,
    LimitSnapshot,
    NodeSnapshot,
    RankSnapshot,
)
from kvxferd.ucx_log import REACHES

RANK_STATES = (*(state.value for state in RankState if state is not RankState.GONE), "remote")
ENGINE_STATES = ("readable", "unreadable", "incomplete", "member")
PEER_STATES = ("connecting", "up", "silent")
PLACEMENTS = ("direct", "resident", "staged")
# RDMA; GPU transports; one copy from process to process; TCP.
TRANSPORT_CLASSES = ("rdma", "gpu", "copy", "tcp", "other")
TRANSFER_STATES = ("writing", "readable", "granted")


def gauges_of(node: NodeSnapshot) -> Iterator[GaugeMetricFamily]:
    """Yield every gauge of the snapshot; a state without members has the value 0."""
    ranks = [rank for engine in node.engines for rank in engine.ranks]
    yield _gauge("kvxferd_worker_sessions", "Open connections on the worker socket.", node.num_sessions)
    yield _gauge_by_label(
        "kvxferd_engines", "Local engines.", "state", ENGINE_STATES, Counter(map(engine_state, node.engines))
    )
    yield _gauge_by_label(
        "kvxferd_registered_ranks", "Ranks of local engines.", "state", RANK_STATES, _count_states(ranks)
    )
    yield _placements(ranks)
    yield _transports(ranks)
    yield _gauge(
        "kvxferd_registered_bytes", "Memory of the ranks registered here.", sum(rank.bytes for rank in ranks)
    )
    yield _gauge_by_label(
        "kvxferd_peers", "Other daemons that are known.", "state", PEER_STATES, _count_states(node.peers)
    )
    yield _gauge_by_label(
        "kvxferd_live_leases", "Transfers published here and not released.", "state",
        TRANSFER_STATES, node.transfer_states,
    )  # fmt: skip
    yield _gauge(
        "kvxferd_published_bytes", "Memory here that published transfers hold until their release.",
        node.published_bytes,
    )  # fmt: skip
    yield _gauge(
        "kvxferd_oldest_published_seconds", "Age of the oldest published transfer that is not released.",
        node.oldest_published_s,
    )  # fmt: skip
    yield from _limits(node.limits)
    yield _gauge(
        "kvxferd_grants_given", "Readers' entries on the leases of transfers here.", node.num_grants_given
    )
    yield _gauge(
        "kvxferd_grants_held", "Grants that local pulls hold, at this node itself too.", node.num_grants_held
    )
    yield _gauge_by_label(
        "kvxferd_running_pulls",
        "Pulls of local ranks that have not ended, by what they wait for; in-doubt ones have failed.",
        "phase",
        PULL_STATES, node.pull_phases,
    )  # fmt: skip
    yield _gauge(
        "kvxferd_quarantined_pulls", "Ended pulls whose blocks may still be written.", node.num_quarantined
    )
    yield _gauge(
        "kvxferd_quarantined_bytes", "Memory that ended pulls may still write.", node.quarantined_bytes
    )
    yield _gauge(
        "kvxferd_retired_movers", "Movers that get nothing new and are not dead yet.", node.num_retired_movers
    )
    yield _gauge("kvxferd_draining", "1 while the daemon takes nothing new.", int(node.draining))


def _limits(limits: Iterable[LimitSnapshot]) -> Iterator[GaugeMetricFamily]:
    highest = GaugeMetricFamily("kvxferd_limit", "The limits of this node.", labels=["limit"])
    used = GaugeMetricFamily(
        "kvxferd_limit_used",
        "What is used of each limit; of one for each engine, rank or peer, by the one that uses most.",
        labels=["limit"],
    )
    for one in limits:
        highest.add_metric([one.name], one.limit)
        used.add_metric([one.name], one.used)
    yield highest
    yield used


def _placements(ranks: Sequence[RankSnapshot]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(
        "kvxferd_rank_placements",
        "Bound ranks, by how their memory is reached.",
        labels=["placement", "proved"],
    )
    counts = Counter((p.kind, p.proved) for rank in ranks if (p := rank.placement) is not None)
    for kind, proved in product(PLACEMENTS, (True, False)):
        family.add_metric([kind, "yes" if proved else "no"], counts[kind, proved])
    return family


def _transports(ranks: Sequence[RankSnapshot]) -> GaugeMetricFamily:
    """Return the transports by class. Device names are not labels: they differ between healthy nodes."""
    family = GaugeMetricFamily(
        "kvxferd_rank_lanes",
        "Ranks by how their movers have connected: to whom, and by what.",
        labels=["reach", "lanes"],
    )
    counts = Counter(
        pair
        for rank in ranks
        for pair in {(lanes.reach, transport_class(lanes.lanes)) for lanes in rank.lanes}
    )
    for reach, name in product(REACHES, TRANSPORT_CLASSES):
        family.add_metric([reach, name], counts[reach, name])
    return family


def transport_class(transports: str) -> str:
    """Return which of `TRANSPORT_CLASSES` the transports belong to; RDMA wins where they are mixed."""
    kinds = {name.partition("/")[0].partition("_")[0] for name in transports.split(", ")}
    if kinds & {"rc", "dc", "ud", "srd", "gga"}:
        return "rdma"
    if transports == "tcp":
        return "tcp"
    if kinds & {"cma", "xpmem", "knem"} and len(kinds) == 1:
        return "copy"
    return "gpu" if kinds & {"cuda", "rocm", "gdr", "ze"} else "other"


def engine_state(engine: EngineSnapshot) -> str:
    """Return which of `ENGINE_STATES` the engine is in."""
    if not engine.complete:
        # All local ranks are present; the home daemon, on another node, assembles the engine.
        return "incomplete" if engine.lacking else "member"
    return "unreadable" if engine.problem else "readable"


def _count_states(things: Iterable[object]) -> Counter[str]:
    return Counter(thing.state for thing in things)  # type: ignore[attr-defined]


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _gauge_by_label(
    name: str, text: str, label: str, known: Iterable[str], counts: Mapping[str, int]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value in dict.fromkeys([*known, *counts]):
        family.add_metric([value], counts.get(value, 0))
    return family
