"""The faults: each injects itself into a cluster and returns how it is taken back."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from tests.proofs.chaos.cluster import Cluster
from tests.proofs.chaos.engine import Engine, Worker
from tests.proofs.chaos.node import Node
from tests.support.nodes.processes import lives, maps
from tests.support.nodes.tcp_proxy import Mode

Heal = Callable[[], None]
Inject = Callable[["Surgeon"], Heal | None]


class Surgeon:
    """Picks victims. A fault that finds none returns None and does not count."""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self.cluster = cluster
        self.rng = rng
        self._dead: set[int] = set()  # ids of engines and nodes that a fault of this round holds down

    def begin(self) -> None:
        self._dead.clear()

    # --- workers

    def kill_worker(self, engine: Engine) -> Heal | None:
        """One rank dies; its engine is restarted by whoever runs it, a new generation."""
        if not self.claim(engine):
            return None
        self._bury(self.rng.choice(engine.workers))
        return lambda: self.restart(engine)

    def _bury(self, worker: Worker) -> None:
        is_exempt = worker.node.num_stopped > 0
        worker.kill()
        if worker.inode:
            self.cluster.watch_memory(f"memory of {worker.engine.name}", worker.inode, is_exempt)
        self.cluster.forget(worker)

    def restart(self, engine: Engine) -> None:
        for worker in engine.workers:
            if not worker.pipe.closed:
                self._bury(worker)
        engine.start()

    def stop_worker(self, engine: Engine) -> Heal | None:
        worker = self.rng.choice(engine.workers)
        if id(engine) in self._dead or worker.stopped_at is not None:
            return None
        worker.pause()
        worker.node.num_stopped += 1

        def go_on() -> None:
            worker.node.num_stopped -= 1
            if not worker.pipe.closed:
                worker.go_on()

        return go_on

    # --- daemons and movers

    def kill_daemon(self, node: Node) -> Heal | None:
        if not self.claim(node):
            return None
        self.end_daemon(node)
        return node.start

    def end_daemon(self, node: Node) -> None:
        movers = node.movers()
        node.kill()
        if not self.cluster.pump_until(lambda: not any(map(lives, movers)), 5.0):
            self.cluster.tally.problem("leaked", f"movers {movers} of {node.name} outlive their daemon")

    def kill_node(self, node: Node) -> Heal | None:
        """The daemon, its movers' parent and every worker, at once."""
        engines = [e for e in self.cluster.engines if node in e.nodes]
        if id(node) in self._dead or any(id(e) in self._dead for e in engines):
            return None
        self._dead |= {id(node), *map(id, engines)}
        parent = node.parent()
        node.send_signal(signal.SIGKILL)
        if parent is not None:
            self._kill(parent)
        for worker in self.cluster.workers():
            if worker.node is node and not worker.pipe.closed:
                self._bury(worker)
        self.end_daemon(node)

        def start() -> None:
            node.start()
            for engine in engines:
                self.restart(engine)

        return start

    def kill_mover(self, engine: Engine) -> Heal | None:
        """The mover of one rank."""
        pid = self._mover_of(engine)
        return self._kill(pid) if pid is not None else None

    def kill_parent(self, node: Node) -> Heal | None:
        """The movers' parent, and its movers with it."""
        if id(node) in self._dead or (pid := node.parent()) is None:
            return None
        return self._kill(pid)

    def _kill(self, pid: int) -> Heal:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return lambda: None

    def stop_mover(self, engine: Engine) -> Heal | None:
        pid = self._mover_of(engine)
        return self.stop(pid, engine.nodes[0]) if pid is not None else None

    def stop_daemon(self, node: Node) -> Heal | None:
        if not self.claim(node):
            return None
        return self.stop(node.pid, node)

    def stop(self, pid: int, node: Node) -> Heal:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
        node.num_stopped += 1

        def go_on() -> None:
            node.num_stopped -= 1
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

        return go_on

    def _mover_of(self, engine: Engine) -> int | None:
        worker = self.rng.choice(engine.workers)
        if id(worker.node) in self._dead or not worker.inode:
            return None
        return next((pid for pid in worker.node.movers() if maps(pid, worker.inode)), None)

    # --- the link

    def link(self, mode: Mode) -> Heal | None:
        """What others ask a node passes through its link."""
        node = self.rng.choice(self.cluster.nodes)
        node.link.set(mode)
        return lambda: node.link.set(Mode.OPEN)

    def claim(self, thing: Engine | Node) -> bool:
        if id(thing) in self._dead:
            return False
        if isinstance(thing, Engine) and any(id(node) in self._dead for node in thing.nodes):
            return False
        self._dead.add(id(thing))
        return True


class Kind(NamedTuple):
    """One kind of fault: how often, how long it lasts (seconds, from and to), and what it does."""

    weight: int
    lasts_s: tuple[float, float]
    inject: Inject


def _engine(surgeon: Surgeon, index: int) -> Engine:
    return surgeon.cluster.engines[index]


def _node(surgeon: Surgeon, index: int) -> Node:
    return surgeon.cluster.nodes[index]


P, D = 0, 1
KINDS: dict[str, Kind] = {
    "kill prefill worker": Kind(5, (0.0, 0.3), lambda s: s.kill_worker(_engine(s, P))),
    "kill decode worker": Kind(5, (0.0, 0.3), lambda s: s.kill_worker(_engine(s, D))),
    "kill source mover": Kind(10, (0.0, 0.0), lambda s: s.kill_mover(_engine(s, P))),
    "kill sink mover": Kind(10, (0.0, 0.0), lambda s: s.kill_mover(_engine(s, D))),
    "kill movers' parent": Kind(4, (0.0, 0.0), lambda s: s.kill_parent(s.rng.choice(s.cluster.nodes))),
    "kill prefill daemon": Kind(4, (0.0, 0.5), lambda s: s.kill_daemon(_node(s, P))),
    "kill decode daemon": Kind(4, (0.0, 0.5), lambda s: s.kill_daemon(_node(s, D))),
    "kill whole node": Kind(3, (0.0, 0.5), lambda s: s.kill_node(s.rng.choice(s.cluster.nodes))),
    "stop source mover": Kind(6, (0.05, 1.5), lambda s: s.stop_mover(_engine(s, P))),
    "stop sink mover": Kind(6, (0.05, 1.5), lambda s: s.stop_mover(_engine(s, D))),
    "stop prefill daemon": Kind(5, (0.05, 1.5), lambda s: s.stop_daemon(_node(s, P))),
    "stop decode daemon": Kind(5, (0.05, 1.5), lambda s: s.stop_daemon(_node(s, D))),
    "stop prefill worker": Kind(4, (0.05, 1.0), lambda s: s.stop_worker(_engine(s, P))),
    "stop decode worker": Kind(4, (0.05, 1.0), lambda s: s.stop_worker(_engine(s, D))),
    # Longer than a lease, a peer's silence and a quarantine.
    "freeze source mover": Kind(1, (5.5, 7.5), lambda s: s.stop_mover(_engine(s, P))),
    "freeze sink mover": Kind(1, (5.5, 7.5), lambda s: s.stop_mover(_engine(s, D))),
    "freeze prefill daemon": Kind(1, (5.5, 7.5), lambda s: s.stop_daemon(_node(s, P))),
    "freeze decode daemon": Kind(1, (5.5, 7.5), lambda s: s.stop_daemon(_node(s, D))),
    "freeze prefill worker": Kind(1, (5.5, 7.5), lambda s: s.stop_worker(_engine(s, P))),
    "freeze decode worker": Kind(1, (5.5, 7.5), lambda s: s.stop_worker(_engine(s, D))),
    "freeze link": Kind(1, (5.5, 7.5), lambda s: s.link(Mode.STALLED)),
    "cut link": Kind(8, (0.05, 1.5), lambda s: s.link(Mode.CUT)),
    "stall link": Kind(8, (0.05, 2.0), lambda s: s.link(Mode.STALLED)),
    "lose questions": Kind(5, (0.05, 2.0), lambda s: s.link(Mode.REQUESTS_LOST)),
    "lose answers": Kind(5, (0.05, 2.0), lambda s: s.link(Mode.REPLIES_LOST)),
    "slow link": Kind(3, (0.1, 1.0), lambda s: s.link(Mode.SLOW)),
}
