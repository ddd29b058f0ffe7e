"""Storms: many nodes depend on one, which fails. Messages between daemons are counted, in virtual time.

`python -m tests.simulation.storms killed,cut-off,restarted 50` prints a line of JSON for each.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tests.simulation import runs
from tests.simulation.engine import Engine, EngineShape
from tests.simulation.kernel import SimulationError
from tests.simulation.network import Wire, name_of
from tests.simulation.shapes import Deployment, draw_deployment, draw_model
from tests.simulation.transfers import Transfer, Wanted
from tests.simulation.world import Traits, World

HUB = "n0"  # the node that fails
SEED = 1
STUCK_S = 600  # of processor time
START_S, BACK_S, REST_S = 120.0, 90.0, 30.0
AWAY_S, RESTART_S = 60.0, 0.5
TRY_AGAIN_S = 0.2  # in which an engine sees that it has nothing, and pulls again
DEADLINE_S = 10.0
PULLS_OF_A_PEER = 4

Report = dict[str, Any]


class Count:
    """Messages since something."""

    def __init__(self, began: float) -> None:
        self._began = began
        self.by_name: Counter[str] = Counter()
        self._by_peer: Counter[str] = Counter()
        self._by_second: Counter[int] = Counter()

    def add(self, wire: Wire, payload: bytes, hub: str, now: float) -> None:
        """Count one."""
        peer = wire.router.host if wire.dealer.host == hub else wire.dealer.host
        self.by_name[name_of(payload).partition(" ")[0]] += 1
        self._by_peer[peer] += 1
        self._by_second[int(now - self._began)] += 1

    def report(self) -> Report:
        """Return what a table needs."""
        return {
            "messages": self.by_name.total(),
            "most_of_a_peer": max(self._by_peer.values(), default=0),
            "most_in_a_second": max(self._by_second.values(), default=0),
            "by_name": dict(self.by_name.most_common(6)),
        }


class Storm:
    """A hub with sources of one rank, and peers with a sink each, which pull from the hub all the time."""

    def __init__(self, num_peers: int, num_sources: int) -> None:
        peers = [f"n{number}" for number in range(1, num_peers + 1)]
        rng = random.Random(SEED)
        model = draw_model(rng)

        def shape(name: str, node: str) -> EngineShape:
            deployment = _deployment_of_one_rank(rng, name, lambda: draw_deployment(rng, model, name))
            return EngineShape(name, (node,), name.startswith("prefill"), deployment, False, False, False)

        shapes = [shape(f"prefill{number}", HUB) for number in range(num_sources)]
        shapes += [shape(f"decode-{name}", name) for name in peers]
        self.world = World(SEED, Traits(), [HUB, *peers], shapes, keeps_story=False)
        self.kernel = self.world.kernel
        self._delivered: set[Engine] = set()  # who has a transfer that was published since `begin`
        self._is_calm = False
        self.begin()
        on_send = self.world.network.on_send

        def count(wire: Wire, payload: bytes) -> float | None:
            self.count.add(wire, payload, self.world.host_of(HUB), self.kernel.now)
            return on_send(wire, payload)

        self.world.network.on_send = count
        self.wait(lambda: self.world.is_ready, START_S, "not every engine is registered")
        for sink in self.world.sinks:
            for _ in range(PULLS_OF_A_PEER):
                self.world.after(rng.uniform(0.0, TRY_AGAIN_S), self._pull, sink, None, Wanted())
        self.wait(lambda: len(self._delivered) == num_peers, START_S, "not every sink has a transfer")

    def wait(self, is_over: Callable[[], bool], within_s: float, text: str) -> None:
        """Let the world go on until something is true. Raises SimulationError where that takes longer."""
        began = self.kernel.now
        while not is_over():
            if self.world.violation is not None or self.kernel.failures:
                raise SimulationError(f"{self.world.violation} {self.kernel.failures[:1]}")
            if self.kernel.now > began + within_s:
                raise SimulationError(f"{text} within {within_s:g} s")
            self.kernel.sleep(0.05)

    def _pull(self, sink: Engine, transfer: Transfer | None, wanted: Wanted) -> None:
        """Have a sink pull, and again when it has; without a source it pulls what it has pulled last."""
        (worker,) = sink.ranks
        if transfer is not None and wanted.is_delivered and transfer.published_at >= self._began:
            self._delivered.add(sink)
        if not any(pull.wanted is wanted for pull in worker.pulls.values()):
            source = self.world.sources[self.world.sinks.index(sink) % len(self.world.sources)]
            transfer, wanted = (source.publish(1) if source.is_ready else transfer), Wanted()
            if transfer is not None and worker.is_ready:
                worker.do(partial(worker.pull, transfer, wanted, DEADLINE_S))
        if not self._is_calm:
            self.world.after(TRY_AGAIN_S, self._pull, sink, transfer, wanted)

    def begin(self) -> None:
        """Count from now on, and transfers that are published from now on."""
        self._began = self.kernel.now
        self.count = Count(self._began)
        self._delivered.clear()

    def wait_delivered(self) -> float:
        """Wait until each sink has another transfer, and return how long that took."""
        self.wait(lambda: len(self._delivered) == len(self.world.sinks), BACK_S, "not every sink has another")
        self._is_calm = True
        return round(self.kernel.now - self._began, 2)


def _deployment_of_one_rank(rng: random.Random, name: str, draw: Callable[[], Deployment]) -> Deployment:
    return next(found for found in iter(draw, None) if len(found.ranks) == 1)


def lost_node(num_peers: int, is_killed: bool) -> Report:
    """All peers lose one node while they pull; each pulls again and again; then it comes back."""
    storm = Storm(num_peers, -(-num_peers // 2))
    world = storm.world
    storm.begin()
    if is_killed:
        for source in world.sources:
            source.die()
        world.kill_daemon(HUB)
    else:
        for peer in world.node_names[1:]:
            world.network.sever(world.host_of(HUB), world.host_of(peer), AWAY_S)
    storm.kernel.sleep(AWAY_S)
    away = storm.count.report()
    storm.begin()
    if is_killed:
        world.start_daemon(HUB)
        for source in world.sources:
            source.start()
    seconds = storm.wait_delivered()
    storm.kernel.sleep(REST_S)
    return {"away": away, "back": storm.count.report(), "delivered_s": seconds}


def restarted_daemon(num_peers: int) -> Report:
    """The hub's daemon is killed while all peers pull, and is back soon."""
    storm = Storm(num_peers, -(-num_peers // 2))
    storm.begin()
    storm.world.kill_daemon(HUB)
    storm.kernel.sleep(RESTART_S)
    storm.world.start_daemon(HUB)
    seconds = storm.wait_delivered()
    storm.kernel.sleep(REST_S)
    return {"back": storm.count.report(), "delivered_s": seconds}


STORMS: dict[str, Callable[[int], Report]] = {
    "killed": lambda peers: lost_node(peers, True),
    "cut-off": lambda peers: lost_node(peers, False),
    "restarted": restarted_daemon,
}


def run(name: str, num_peers: int) -> Report:
    """Run a storm in a process of its own. Raises SimulationError where its world does not recover."""

    def work() -> bytes:
        return json.dumps({"storm": name, "peers": num_peers, **STORMS[name](num_peers)}).encode()

    found: Report = json.loads(runs.finish(runs.start(work, None, STUCK_S)))
    return found


def main(arguments: Sequence[str]) -> None:
    """Run storms by name with so many peers, and print a line of JSON for each."""
    names, peers = arguments[0].split(","), [int(number) for number in arguments[1].split(",")]
    for name in names:
        for number in peers:
            print(json.dumps(run(name, number)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
