"""Two daemons with an engine each, requests that go on, and what their outputs show."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvxferd.errors import KvxferdError
from kvxferd.tooling.child_process import ChildError
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.requests import TOKENS, ids_for, publish, spec_of
from tests.support.ports import free_port
from tests.support.prometheus_server import PrometheusServer

PAUSE_S = 0.05
DEADLINE_S = 3.0
WATCH_EVERY_S = 0.25
COMMAND_S = 60.0
LOG_LINES = 200

# What a verdict may have: failed pulls, a limit that is near, kinds of warnings.
SIGNS = ("Pulls fail", "max_transfers_per_engine", "same-node-tcp", "peer-turned-away")

# Of each node, by a name: the verb and its options. The status page shows what `top` does.
VERBS = {
    "status": ("status",),
    "history --failed": ("history", "--failed", "--limit", "5"),
    "doctor": ("doctor", "--check", "answering"),
    "top --once": ("top", "--once"),
}


class Traffic:
    """Publishes at the source and pulls at the sink, one after another, whatever fails."""

    def __init__(self, source: Any, sink: Any) -> None:
        self.num_delivered = 0
        self.num_failed = 0
        self.after_publish: Callable[[int, dict[str, Any]], None] = lambda request, ref: None
        self.lock = threading.Lock()  # of the ranks' pipes
        self._source, self._sink = source, sink
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(60)

    def _run(self) -> None:
        request, ref = 0, None
        while not self._over.wait(PAUSE_S):
            request += 1
            with self.lock:
                with suppress(ChildError, TimeoutError, OSError):
                    ref = publish([self._source], request)
                    self.after_publish(request, ref)
                if ref is None:
                    continue
                self._pull(request, ref)

    def _pull(self, request: int, ref: dict[str, Any]) -> None:
        try:
            ticket = self._sink.pull(ref, ids_for(1000 + request), TOKENS, deadline_s=DEADLINE_S)
            name, _ = self._sink.end_of(ticket)
        except (ChildError, TimeoutError, OSError, AssertionError):
            name = "Failed"
        if name == "Delivered":
            self.num_delivered += 1
        else:
            self.num_failed += 1


class Stage:
    """A prefill and a decode node. `seen` has when each of `SIGNS` was first in its verdict, by node.

    With `has_prometheus` a Prometheus scrapes both, and `alerts` has when each alert fired first, by node.
    """

    has_prometheus = False

    def __init__(
        self,
        directory: Path,
        prefill_flags: tuple[str, ...] = (),
        decode_flags: tuple[str, ...] = (),
        **environ: str,
    ) -> None:
        self.fleet = Fleet(directory)
        self.alerts: dict[tuple[str, str], float] = {}
        self._prometheus = PrometheusServer(directory / "prometheus") if self.has_prometheus else None
        self.prefill = self._daemon("prefill", prefill_flags, environ)
        self.decode = self._daemon("decode", decode_flags, environ)
        self.nodes = {"prefill": self.prefill, "decode": self.decode}
        self.endpoints = {name: node.endpoint for name, node in self.nodes.items()}
        self.seen: dict[tuple[str, str], float] = {}
        self._over = threading.Event()
        (self.source,) = self.fleet.engine(self.prefill, spec_of("prefill"))
        (self.sink,) = self.fleet.engine(self.decode, spec_of("decode"))
        self.began = time.time()
        self.traffic = Traffic(self.source, self.sink)
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def close(self) -> None:
        self._over.set()
        self.traffic.close()
        self._watcher.join(10)
        if self._prometheus is not None:
            self._prometheus.close()
        self.fleet.stop()

    def _daemon(self, name: str, flags: tuple[str, ...], environ: dict[str, str]) -> Daemon:
        if self._prometheus is None:
            return self.fleet.daemon(name, *flags, **environ)
        port = free_port()
        daemon = self.fleet.daemon(name, *flags, "--http-bind", f"127.0.0.1:{port}", **environ)
        self._prometheus.watch(name, port)
        return daemon

    def await_traffic(self, num_pulls: int, limit_s: float = 60.0) -> None:
        """Return once so many pulls have ended."""
        until = time.monotonic() + limit_s
        while self.traffic.num_delivered + self.traffic.num_failed < num_pulls and time.monotonic() < until:
            time.sleep(0.05)

    def outputs(self, nodes: Iterable[str]) -> dict[str, dict[str, str]]:
        """Return what each output of those nodes that live shows now."""
        living = {name: self.nodes[name] for name in nodes if self.nodes[name].exit_code is None}
        return {name: _outputs_of(node) for name, node in living.items()}

    def verdict(self, name: str) -> str:
        """Return a node's verdict; "" of one that does not answer."""
        node = self.nodes[name]
        with suppress(KvxferdError, OSError):
            if node.exit_code is None:
                return str(node.control.get("/v1/status")["verdict"]["text"])
        return ""

    def _watch(self) -> None:
        while not self._over.wait(WATCH_EVERY_S):
            for name in self.nodes:
                verdict = self.verdict(name)
                for sign in SIGNS:
                    if sign in verdict:
                        self.seen.setdefault((name, sign), time.time())
            if self._prometheus is not None:
                for alert in self._prometheus.firing():
                    labels = alert["labels"]
                    self.alerts.setdefault((labels.get("instance", ""), labels["alertname"]), time.time())


def _outputs_of(node: Daemon) -> dict[str, str]:
    socket = str(node.directory / "control.sock")
    found = {}
    for name, verb in VERBS.items():
        command = [sys.executable, "-m", "kvxferd.cli", *verb, "--socket", socket]
        environ = dict(os.environ, COLUMNS="160", NO_COLOR="1")
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_S, env=environ, check=False
        )
        found[name] = done.stdout + done.stderr
    found["log"] = "\n".join(node.log.read_text(errors="replace").splitlines()[-LOG_LINES:])
    return found
