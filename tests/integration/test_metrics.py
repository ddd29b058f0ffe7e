"""A scrape of real daemons before and after they moved bytes: each series moves as its help text says."""

from __future__ import annotations

import os
import signal

from prometheus_client.parser import text_string_to_metric_families

from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.requests import TOKENS, ids_for, publish, pull_and_check, spec_of
from tests.support.nodes.waiting import wait_until


class Scrape:
    """The samples of one scrape."""

    def __init__(self, daemon: Daemon) -> None:
        self._values = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(daemon.metrics().partition("\r\n\r\n")[2])
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self._values[(f"kvxferd_{name}", *sorted(labels.items()))]


def test_every_series_moves_as_its_help_says(fleet: Fleet):
    by = {"KVXFERD_METRICS_BY_ENGINE": "true", "KVXFERD_METRICS_BY_PEER": "true"}
    prefill = fleet.daemon("prefill", KVXFERD_TRANSFER_LEASE_S="3", **by)
    decode = fleet.daemon("decode", KVXFERD_LIMITS_MAX_RANKS="1", **by)
    reading = Scrape(decode)
    assert reading("limit", limit="max_ranks") == 1

    source, sink = fleet.pair(prefill, decode)
    first = publish([source], 0)
    serving = Scrape(prefill)
    assert serving("live_leases", state="readable") == 1
    assert serving("published_bytes") > 0
    assert serving("oldest_published_seconds") > 0
    assert serving("limit_used", limit="max_transfers_per_engine") == 1

    pull_and_check([sink], first, 0)
    pull_and_check([sink], publish([source], 1), 1)
    name, _ = sink.end_of(sink.pull(first, ids_for(9), TOKENS))  # it is over
    assert name == "Failed"
    wait_until(lambda: Scrape(decode)("pulls_total", outcome="delivered", code="none") == 2, "two pulls")
    wait_until(lambda: Scrape(prefill)("served_pulls_total") == 2, "two acknowledgements")
    serving, reading = Scrape(prefill), Scrape(decode)
    assert reading("pulls_total", outcome="failed", code="released") == 1
    assert reading("pull_bytes_count") == 2
    pulled = reading("pulled_bytes_total")
    assert pulled == reading("pull_bytes_sum") > 0
    assert serving("served_bytes_total") == pulled  # a node that only serves shows it
    assert serving("pulled_bytes_total") == reading("served_bytes_total") == 0
    assert serving("releases_total", why="completed") == 2
    assert reading("handshakes_total", outcome="ok") == 1
    assert reading("peers", state="up") == 1
    assert reading("limit_used", limit="max_peers") == 1
    for phase in ("queue", "handshake", "grant", "plan", "wire", "post", "fence", "connect", "other"):
        assert reading("pull_phase_seconds_count", phase=phase) >= 2
    assert reading("engine_pulls_total", source="prefill", sink="decode", outcome="delivered") == 2
    assert reading("engine_pulled_bytes_total", source="prefill", sink="decode") == pulled
    assert serving("engine_served_bytes_total", source="prefill", sink="decode") == pulled
    peer = prefill.endpoint.removeprefix("tcp://").partition("#")[0]
    assert reading("peer_pulls_total", peer=peer, outcome="failed") == 1
    assert reading("event_loop_lag_seconds_count") > 0
    assert reading("movers", state="assigned") == 1
    assert reading("mover_cpu_seconds_total") > 0
    assert reading("mover_memory_bytes") > 1 << 20

    # This transfer has no reader: its lease ends. A mover is killed: its rank gets another.
    publish([source], 2)
    wait_until(lambda: Scrape(prefill)("releases_total", why="lease-expired") == 1, "expired")
    assert Scrape(prefill)("published_bytes") == Scrape(prefill)("oldest_published_seconds") == 0
    cpu_s = Scrape(decode)("mover_cpu_seconds_total")
    fleet.start_registering(decode, spec_of("other"), fleet.rank())
    wait_until(lambda: Scrape(decode)("busy_refusals_total", limit="max_ranks") >= 1, "refused")
    killed = decode.movers()
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: Scrape(decode)("mover_exits_total", cause="died") == len(killed), "each is counted")
    assert Scrape(decode)("mover_cpu_seconds_total") >= cpu_s
