"""A real Prometheus scrapes real daemons: alerts fire for their faults and clear, dashboards have data.

Some faults of each kind: a daemon that is gone, not ready, silent or unread, pulls that fail, leases, ranks
and movers. promtool's tests have every rule, over series that are made up.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from kvxferd.tooling.control_client import ControlClient
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.rank_process import RankProcess, ranks_of
from tests.support.nodes.requests import TOKENS, ids_for, publish, pull_and_check, spec_of
from tests.support.nodes.waiting import wait_until
from tests.support.ports import free_port
from tests.support.prometheus_server import LIMIT_S, PrometheusServer, require_prometheus
from tests.support.pull_traffic import PullTraffic
from tests.support.repository import ROOT

DASHBOARDS = sorted((ROOT / "deploy" / "monitoring" / "grafana").glob("*.json"))
_NUMBERS = itertools.count()

pytestmark = [pytest.mark.monitoring, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusServer]:
    require_prometheus()
    with closing(PrometheusServer(tmp_path_factory.mktemp("prometheus") / "server")) as server:
        yield server


class Watched:
    """Starts daemons that Prometheus scrapes, each under a name of its own."""

    def __init__(self, fleet: Fleet, prometheus: PrometheusServer) -> None:
        self._fleet = fleet
        self._prometheus = prometheus
        self._names: list[str] = []

    def daemon(self, *flags: str, **environ: str) -> tuple[str, Daemon]:
        """Return a daemon with its `instance`."""
        name, port = self.address()
        daemon = self._fleet.daemon(name, "--http-bind", f"127.0.0.1:{port}", *flags, **environ)
        self.watch(name, port)
        return name, daemon

    def address(self) -> tuple[str, int]:
        """Return a name and a port for a daemon that the test starts itself."""
        return f"node-{next(_NUMBERS)}", free_port()

    def watch(self, name: str, port: int) -> None:
        """Have Prometheus scrape it."""
        self._names.append(name)
        self._prometheus.watch(name, port)

    def close(self) -> None:
        for name in self._names:
            self._prometheus.forget(name)


@pytest.fixture
def watched(fleet: Fleet, prometheus: PrometheusServer) -> Iterator[Watched]:
    with closing(Watched(fleet, prometheus)) as watched:
        yield watched


def gone_reference(source: RankProcess, sink: RankProcess) -> dict[str, Any]:
    """Return the reference of a transfer that was read and released."""
    ref = publish([source], 0)
    pull_and_check([sink], ref, 0)
    source.await_event("Released")
    return ref


def test_alerts_fire_and_clear_and_dashboards_have_data(
    watched: Watched, fleet: Fleet, prometheus: PrometheusServer
) -> None:
    more = {"KVXFERD_METRICS_BY_ENGINE": "true", "KVXFERD_METRICS_BY_PEER": "true"}
    (prefill_node, prefill), (decode_node, decode) = watched.daemon(**more), watched.daemon(**more)
    source, sink = fleet.pair(prefill, decode)
    (other_sink,) = fleet.engine(decode, spec_of("other"))
    ref = gone_reference(source, sink)
    traffic = PullTraffic(source, sink, pause_s=0.2)
    try:
        code = fail_pulls(other_sink, ref)
        alert = prometheus.await_alert("KvxferdPullsFail", instance=decode_node, code=code)
        assert alert["labels"]["job"] == "kvxferd"
        assert alert["annotations"]["runbook_url"].endswith("#kvxferdpullsfail")
        # What only a reader has, or only a source, is empty for the other.
        assert empty_panels(prometheus, prefill_node) & empty_panels(prometheus, decode_node) == set()
        prometheus.await_clear("KvxferdPullsFail", instance=decode_node)
    finally:
        traffic.close()
    assert not traffic.failures
    prefill.stop()
    prometheus.await_alert("KvxferdDown", instance=prefill_node)
    prefill.start()
    prometheus.await_clear("KvxferdDown", instance=prefill_node)
    for firing in prometheus.firing():
        assert "error" not in json.dumps(firing["annotations"]), firing


def fail_pulls(sink: RankProcess, ref: dict[str, Any]) -> str:
    """Have pulls of a transfer that is gone fail, some in each second. Returns their code."""
    for number in range(20):
        name, fields = sink.end_of(sink.pull(ref, ids_for(number), TOKENS))
        assert name == "Failed"
    return str(fields["code"])


def empty_panels(prometheus: PrometheusServer, instance: str) -> set[str]:
    """Return the queries of all dashboards that have no number for that node."""
    values = {"job": "kvxferd", "instance": instance, "__rate_interval": "20s"}
    values |= {"source": ".*", "sink": ".*"}  # as "All" of a variable
    empty = set()
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                query = re.sub(r"\$(\w+)", lambda found: values[found[1]], target["expr"])
                numbers = [float(sample["value"][1]) for sample in prometheus.query(query)]
                if all(math.isnan(number) for number in numbers):
                    empty.add(f"{path.stem}: {panel['title']}: {target['expr']}")
    return empty


# A fault for each alert.


def test_nothing_is_scraped(watched: Watched, prometheus: PrometheusServer) -> None:
    prometheus.await_alert("KvxferdNoTargets")
    watched.daemon()
    prometheus.await_clear("KvxferdNoTargets")


def test_a_daemon_without_its_library(watched: Watched, prometheus: PrometheusServer, tmp_path: Path) -> None:
    for library in ("nixl", "rixl"):
        (tmp_path / "broken" / library).mkdir(parents=True)
        (tmp_path / "broken" / library / "__init__.py").write_text("raise ImportError('broken')\n")
    name, port = watched.address()
    flags = ("--http-bind", f"127.0.0.1:{port}")
    daemon = Daemon(tmp_path / name, {"PYTHONPATH": str(tmp_path / "broken")}, flags)
    try:
        watched.watch(name, port)
        prometheus.await_alert("KvxferdNotReady", instance=name)
    finally:
        daemon.stop()
    prometheus.await_clear("KvxferdNotReady", instance=name)


def test_a_daemon_stops_answering(watched: Watched, fleet: Fleet, prometheus: PrometheusServer) -> None:
    (prefill_node, prefill), (decode_node, decode) = watched.daemon(), watched.daemon()
    source, sink = fleet.pair(prefill, decode)
    gone_reference(source, sink)
    refs = [publish([source], request) for request in range(1, 20)]
    prefill.send_signal(signal.SIGSTOP)
    try:
        for request, ref in enumerate(refs):  # the peer is silent once one of them has waited for 10 s
            sink.pull(ref, ids_for(request), TOKENS, deadline_s=40.0)
            time.sleep(0.5)
        prometheus.await_alert("KvxferdPeersSilent", instance=decode_node)
        prometheus.await_alert("KvxferdDown", instance=prefill_node)
    finally:
        prefill.send_signal(signal.SIGCONT)
    prometheus.await_clear("KvxferdPeersSilent", instance=decode_node)
    prometheus.await_clear("KvxferdDown", instance=prefill_node)


def test_transfers_that_nobody_reads(watched: Watched, fleet: Fleet, prometheus: PrometheusServer) -> None:
    node, daemon = watched.daemon()
    (source,) = fleet.engine(daemon, spec_of("prefill"))
    for number in range(60):
        source.publish(f"unread-{number}", ids_for(number), TOKENS, lease_s=0.5)
        time.sleep(0.5)
        if prometheus.alert("KvxferdLeasesExpire", instance=node):
            break
    prometheus.await_alert("KvxferdLeasesExpire", instance=node)
    prometheus.await_clear("KvxferdLeasesExpire", instance=node)


def test_an_engine_without_its_second_rank(
    watched: Watched, fleet: Fleet, prometheus: PrometheusServer
) -> None:
    node, daemon = watched.daemon()
    first, second = ranks_of(spec_of("half", tp_size=2))
    fleet.register(daemon, first)
    prometheus.await_alert("KvxferdEngineUnreadable", instance=node, state="incomplete")
    fleet.register(daemon, second)
    prometheus.await_clear("KvxferdEngineUnreadable", instance=node)


def test_a_mover_in_doubt(watched: Watched, fleet: Fleet, prometheus: PrometheusServer) -> None:
    """Without UCX's log nobody knows that it is TCP, so a read that does not end leaves doubt."""
    node, daemon = watched.daemon(KVXFERD_MOVER_ENVIRONMENT="UCX_TLS=^cma,UCX_LOG_LEVEL=warn")
    source, sink = fleet.pair(daemon)
    gone_reference(source, sink)
    ref = publish([source], 1)
    sink.prepare(ref)
    wait_until(lambda: daemon.status()["num_grants_held"] == 1, "it is granted")
    (mover,) = daemon.movers_of(source.memory_inode())
    os.kill(mover, signal.SIGSTOP)
    try:
        sink.pull(ref, ids_for(1), TOKENS, deadline_s=1.0)
        prometheus.await_alert("KvxferdQuarantineStays", instance=node)
    finally:
        os.kill(mover, signal.SIGCONT)
    prometheus.await_clear("KvxferdQuarantineStays", instance=node)


class UnreadLog(Daemon):
    """Its log goes to a pipe of one page, some ten lines, that nobody reads."""

    def start(self) -> None:
        self.reading, writing = os.pipe()
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        self._process = subprocess.Popen(self._command, stdout=writing, stderr=writing, env=self._environ)
        os.close(writing)
        self.control = ControlClient(str(self.directory / "control.sock"))

    @property
    def is_ready(self) -> bool:
        assert self.exit_code is None
        return Path(self.control.socket_path).exists() and self.control.request("GET", "/readyz")[0] == 200


def test_a_log_that_is_not_read(
    watched: Watched, fleet: Fleet, prometheus: PrometheusServer, tmp_path: Path
) -> None:
    name, port = watched.address()
    daemon = UnreadLog(tmp_path / name, {}, ("--http-bind", f"127.0.0.1:{port}", "--log-level", "debug"))
    try:
        wait_until(lambda: Path(daemon.control.socket_path).exists(), "it serves", LIMIT_S)
        watched.watch(name, port)
        source, sink = fleet.pair(daemon)
        ref = gone_reference(source, sink)
        while not prometheus.alert("KvxferdLogLinesDropped", instance=name):
            fail_pulls(sink, ref)
        os.set_blocking(daemon.reading, False)
        with suppress(BlockingIOError):
            while os.read(daemon.reading, 1 << 20):
                pass
        prometheus.await_clear("KvxferdLogLinesDropped", instance=name)
    finally:
        daemon.kill()
        os.close(daemon.reading)


def test_a_slow_path_within_the_node(watched: Watched, fleet: Fleet, prometheus: PrometheusServer) -> None:
    node, daemon = watched.daemon(KVXFERD_MOVER_ENVIRONMENT="UCX_TLS=^cma")
    source, sink = fleet.pair(daemon)
    gone_reference(source, sink)
    prometheus.await_alert("KvxferdWarning", instance=node, kind="same-node-tcp")
    source.stop()
    sink.stop()
    prometheus.await_clear("KvxferdWarning", instance=node, kind="same-node-tcp")
