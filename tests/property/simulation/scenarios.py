"""Storms: many nodes and one that fails. What is counted is messages, in virtual time."""

from __future__ import annotations

import json
import logging
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvxferd.client import events as ce
from kvxferd.wire.common import Message
from tests.property.simulation.agenda import Agenda
from tests.property.simulation.engine import MAX_ATTEMPTS, Engine, EngineShape, Transfer
from tests.property.simulation.oracle import Wanted
from tests.property.simulation.process import Process
from tests.property.simulation.watcher import Watcher
from tests.property.simulation.world import Traits, World

HUB = "n0"  # the node that fails
CHECK_EVERY_S = 0.05
BURST_S = 0.01
START_S = 120.0


@dataclass
class Count:
    """Messages since the fault."""

    by_kind: Counter[str] = field(default_factory=Counter)
    by_second: Counter[int] = field(default_factory=Counter)
    by_burst: Counter[int] = field(default_factory=Counter)
    by_node: Counter[str] = field(default_factory=Counter)
    last_at: float = 0.0

    def add(self, kind: str, node: str, since_s: float) -> None:
        """Count one."""
        self.by_kind[kind] += 1
        self.by_second[int(since_s)] += 1
        self.by_burst[int(since_s / BURST_S)] += 1
        self.by_node[node] += 1
        self.last_at = since_s

    @property
    def total(self) -> int:
        """All of them."""
        return self.by_kind.total()

    def row(self) -> dict[str, Any]:
        """Return what a table needs."""
        return {
            "total": self.total,
            "per_node_max": max(self.by_node.values(), default=0),
            "peak_per_s": max(self.by_second.values(), default=0),
            "peak_per_10ms": max(self.by_burst.values(), default=0),
            "last_at_s": round(self.last_at, 2),
            "by_kind": dict(self.by_kind.most_common(6)),
        }


class Storm(Watcher):
    """A hub with sources, and peers with a sink each. Sinks pull from sources of the hub.

    `peer_messages`: between daemons, to and from the hub, by the other node. `worker_messages`: of processes
    to the hub's daemon, connection attempts included, by process.
    """

    def __init__(
        self,
        seed: int,
        num_peers: int,
        num_sources: int,
        tp_size: int = 1,
    ) -> None:
        self.agenda = Agenda(seed)
        self.rng = random.Random(self.agenda.rng.random())
        self.num_peers = num_peers
        self.peer_messages, self.worker_messages = Count(), Count()
        self.began_at = 0.0
        self.retry_s: Callable[[ce.Failed], float | None] = lambda failed: None
        self.num_failed = 0
        peers = [f"n{number}" for number in range(1, num_peers + 1)]
        shapes = [
            EngineShape(f"prefill{number}", (HUB,) * tp_size, True, tp_size, "HND", False, False)
            for number in range(num_sources)
        ]
        shapes += [EngineShape(f"decode-{name}", (name,), False, 1, "NHD", False, False) for name in peers]
        self.world = World(self.agenda, Traits(), [HUB, *peers], shapes, integrity_every=1009)
        self.sources, self.sinks = self.world.sources, self.world.sinks
        self.world.watch(self)
        self.ready_after(START_S)

    # --- what is counted

    def begin(self) -> None:
        """Count from now on."""
        self.began_at = self.agenda.now
        self.peer_messages, self.worker_messages = Count(), Count()
        self.num_failed = 0

    @property
    def since_s(self) -> float:
        """Seconds since `begin`."""
        return self.agenda.now - self.began_at

    def posted(self, source: str, target: str, message: Message) -> None:
        """Count a message between daemons."""
        other = target if source == HUB else source
        self.peer_messages.add(type(message).__name__, other, self.since_s)

    def connecting(self, process: Process) -> None:
        """Count an attempt to connect to the hub's daemon."""
        if process.node_name == HUB:
            self.worker_messages.add("connect", process.name, self.since_s)

    def sent_to_daemon(self, process: Process, message: Message) -> None:
        """Count a message to the hub's daemon."""
        if process.node_name == HUB:
            self.worker_messages.add(type(message).__name__, process.name, self.since_s)

    # --- what happens

    def run(self, seconds: float) -> None:
        """Let so much time pass."""
        self.agenda.run(self.agenda.now + seconds)

    def ready_after(self, within_s: float) -> float:
        """Wait until every engine is registered; return how long that took."""
        return self._wait(within_s, self.world.is_ready, "not every engine is registered")

    def delivered_after(self, within_s: float) -> float:
        """Have each sink pull anew until each has a transfer; return how long that took."""
        waiting: dict[Engine, list[Wanted]] = {sink: [] for sink in self.sinks}

        def is_over() -> bool:
            busy = {pull.process.engine for pull in self.world.oracle.open_pulls}
            for sink, wanted in list(waiting.items()):
                if any(one.is_delivered for one in wanted):
                    del waiting[sink]
                elif sink not in busy:
                    before = len(self.world.oracle.wanted)
                    self.transfer(sink)
                    waiting[sink] = self.world.oracle.wanted[before:]
            return not waiting

        return self._wait(within_s, is_over, "not every sink has a transfer")

    def _wait(self, within_s: float, is_over: Callable[[], bool], text: str) -> float:
        began = self.agenda.now
        while not is_over():
            if self.agenda.now > began + within_s:
                raise AssertionError(f"{text} within {within_s:g} s")
            self.run(CHECK_EVERY_S)
        return self.agenda.now - began

    def source_of(self, sink: Engine) -> Engine:
        """Return which source a sink pulls from."""
        return self.sources[self.sinks.index(sink) % len(self.sources)]

    def transfer(self, sink: Engine) -> Transfer | None:
        """Publish, and have the sink pull."""
        transfer = self.source_of(sink).publish()
        if transfer is not None:
            sink.pull(transfer)
        return transfer

    def handled(self, process: Process, event: ce.Event) -> None:
        """Have an engine pull again after a failure, as the scenario decides."""
        if not isinstance(event, ce.Failed):
            return
        self.num_failed += 1
        pull = process.engine.pulls[process, event.ticket.number]
        delay_s, pull.wanted.attempts = self.retry_s(event), MAX_ATTEMPTS
        if delay_s is not None:
            process.after(delay_s, process.engine._retry, process, pull)
            return
        source, transfer = self.source_of(process.engine), self.world.transfer_of[pull]
        if source.is_usable and source.transfers.get(transfer.transfer_id) is transfer:
            source.unpublish(transfer)

    def kill_hub(self) -> None:
        """Kill the hub's daemon and all its engines."""
        self.world.kill_daemon(HUB)
        for source in self.sources:
            source.die()

    def start_hub(self) -> None:
        """Start the hub's daemon and engines, which have another generation."""
        self.world.start_daemon(HUB)
        for source in self.sources:
            source.start()

    def cut_hub(self, number: int) -> None:
        """Cut the hub off from all peers (1), or join it again (-1)."""
        for name in self.world.node_names[1:]:
            self.world.network.partitions[HUB, name] += number
            self.world.network.partitions[name, HUB] += number


def retry_as_told(failed: ce.Failed) -> float:
    """Pull again after `retry_after_s`; after 50 ms where the failure names no time."""
    return failed.retry_after_s or 0.05


Report = dict[str, Any]
REST_S = 60.0
PULLS_OF_A_PEER = 4


def lost_node(seed: int, num_peers: int, is_killed: bool, away_s: float = 60.0) -> Report:
    """All peers lose one prefill node while they pull; each pulls again and again; then it comes back."""
    storm = Storm(seed, num_peers, -(-num_peers // 2))
    storm.delivered_after(30.0)
    storm.run(5.0)
    storm.begin()
    storm.retry_s = retry_as_told
    for sink in storm.sinks:
        for _ in range(PULLS_OF_A_PEER):
            storm.agenda.after(storm.rng.uniform(0.0, 0.01), storm.transfer, sink)
    storm.run(0.005)
    if is_killed:
        storm.kill_hub()
    else:
        storm.cut_hub(1)
    storm.run(away_s)
    away, num_failed = storm.peer_messages.row(), storm.num_failed
    storm.retry_s = lambda failed: None
    storm.begin()
    if is_killed:
        storm.start_hub()
    else:
        storm.cut_hub(-1)
    registered_s = storm.ready_after(30.0)
    delivered_s = storm.delivered_after(60.0)
    storm.run(REST_S)
    return {
        "storm": f"lost node, {'killed' if is_killed else 'partitioned'}",
        "peers": num_peers,
        "failed": num_failed,
        "away": away,
        "back": storm.peer_messages.row(),
        "registered_s": round(registered_s, 2),
        "delivered_s": round(delivered_s, 2),
    }


def restarted_daemon(seed: int, num_peers: int, num_sources: int = 32, away_s: float = 0.5) -> Report:
    """A daemon with two ranks of each source is killed and restarted while peers pull from it."""
    storm = Storm(seed, num_peers, num_sources, tp_size=2)
    storm.delivered_after(30.0)
    storm.run(5.0)
    storm.begin()
    storm.retry_s = retry_as_told
    for sink in storm.sinks:
        storm.transfer(sink)
    storm.run(0.003)
    storm.world.kill_daemon(HUB)
    storm.run(away_s)
    storm.world.start_daemon(HUB)
    registered_s = storm.ready_after(30.0)
    delivered_s = storm.delivered_after(60.0)
    storm.run(REST_S)
    return {
        "storm": f"restarted daemon with {2 * num_sources} ranks",
        "peers": num_peers,
        "failed": storm.num_failed,
        "peer": storm.peer_messages.row(),
        "worker": storm.worker_messages.row(),
        "registered_s": round(registered_s, 2),
        "delivered_s": round(delivered_s, 2),
    }


SCENARIOS: dict[str, Callable[[int, int], Report]] = {
    "killed": lambda seed, peers: lost_node(seed, peers, True),
    "partitioned": lambda seed, peers: lost_node(seed, peers, False),
    "restarted": restarted_daemon,
}


def main(arguments: Sequence[str]) -> None:
    """Run scenarios by name with so many peers, and print a line of JSON for each."""
    logging.disable(logging.CRITICAL)
    names, peers = arguments[0].split(","), [int(number) for number in arguments[1].split(",")]
    for name in names:
        for number in peers:
            print(json.dumps(SCENARIOS[name](1, number)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
