"""A daemon and an engine on each of two hosts, UCX over TCP between them."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from kvxferd.layout import EngineSpec
from kvxferd.mover.ucx_settings import tls_with_cuda
from tests.support.cluster.engine import Engine, Read, Transfer
from tests.support.cluster.fleet import Fleet
from tests.support.cluster.node import Node
from tests.support.cluster.results import Tally
from tests.support.cluster.traffic import Traffic
from tests.support.network_namespaces import DEVICE, Cable, Host

PORT = 9441
START_S = 60.0
RECOVER_S = 40.0
PROBE_DEADLINE_S = 4.0
# 8 KiB a token, so that a transfer of MAX_TOKENS is 4 MiB and takes a while over TCP.
FACTS: dict[str, Any] = {"num_kv_heads": 8, "head_dim": 64, "block_tokens": 16, "num_blocks": 192}
MAX_TOKENS = 512


class Pair:
    """`deliver` and `read` are what tests do; whatever goes wrong meanwhile is in `tally.problems`."""

    def __init__(self, cable: Cable, directory: Path) -> None:
        self.cable = cable
        self.tally = Tally()
        self.fleet = Fleet(self.tally)
        self._traffic = Traffic(self.fleet, random.Random(1), MAX_TOKENS)
        self._directory = directory

    def start(self) -> None:
        for host in (self.cable.near, self.cable.far):
            self.fleet.nodes.append(self.node(host, host.namespace))
        self._await_nodes()
        for index, (name, layout) in enumerate((("prefill", "HND"), ("decode", "NHD"))):
            spec = EngineSpec(name, "g", num_layers=4, num_kv_heads=8)
            self.fleet.engines.append(Engine(spec, [self.fleet.nodes[index]], FACTS | {"layout": layout}))
        self._await_engines()

    def node(self, host: Host, name: str) -> Node:
        """Start a daemon on a host."""
        environ = {"UCX_TLS": tls_with_cuda("tcp"), "UCX_NET_DEVICES": DEVICE}
        return Node(self._directory / name, environ, f"tcp://{host.address}:{PORT}", host.prefix)

    def _await_nodes(self) -> None:
        assert self.fleet.pump_until(lambda: all(n.is_ready for n in self.fleet.nodes), START_S)

    def _await_engines(self) -> None:
        assert self.fleet.pump_until(lambda: all(e.is_registered for e in self.fleet.engines), START_S)

    @property
    def source(self) -> Engine:
        return self.fleet.engines[0]

    @property
    def sink(self) -> Engine:
        return self.fleet.engines[1]

    def publish(self) -> Transfer:
        made: list[Transfer] = []

        def has_room() -> bool:
            if (transfer := self._traffic.publish(self.source, lambda *_: None)) is not None:
                made.append(transfer)
            return bool(made)

        assert self.fleet.pump_until(has_room, 30.0), "transfers are never released"
        (transfer,) = made
        assert self.fleet.pump_until(lambda: transfer.ref is not None, 10.0)
        return transfer

    def read(self, transfer: Transfer, deadline_s: float) -> Read:
        return self.fleet.read(self.source, self.sink, transfer, deadline_s)

    def await_end(self, read: Read, limit_s: float) -> list[str]:
        """How it ended."""
        assert self.fleet.pump_until(lambda: not read.pending, limit_s), "a pull hangs"
        return read.outcomes

    def deliver(self, deadline_s: float = 20.0) -> None:
        """One transfer, from publish to every byte checked."""
        read = self.read(self.publish(), deadline_s)
        assert self.await_end(read, deadline_s + 5.0) == ["delivered"]

    def deliver_again(self) -> float:
        """Try until one works; return the seconds that it took."""
        began = time.monotonic()
        while time.monotonic() < began + RECOVER_S:
            transfer = self.publish()
            if self.await_end(self.read(transfer, PROBE_DEADLINE_S), 15.0) == ["delivered"]:
                return time.monotonic() - began
            self.source.unpublish(transfer)
        raise AssertionError(f"nothing works {RECOVER_S} s later: {self.tally.outcomes}")

    def replace_daemon(self, index: int, name: str) -> None:
        """Another daemon, of another directory, takes the address; the engine starts anew there."""
        host = (self.cable.near, self.cable.far)[index]
        engine = self.fleet.engines[index]
        for worker in engine.workers:
            worker.kill()
            self.fleet.forget(worker)
        self.fleet.nodes[index].kill()
        self.fleet.nodes[index] = self.node(host, name)
        engine.nodes = [self.fleet.nodes[index]]
        self._await_nodes()
        engine.start()
        self._await_engines()

    def stop(self) -> None:
        for engine in self.fleet.engines:
            for worker in engine.workers:
                if not worker.pipe.closed:
                    worker.kill()
        for node in self.fleet.nodes:
            self.tally.problems += node.end()
