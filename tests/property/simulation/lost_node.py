"""A node that is gone without a word: what others know of it ends in time, and it may come back."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from kvxferd.core.registry import MemberRank
from tests.property.simulation.oracle import Violation

if TYPE_CHECKING:
    from tests.property.simulation.engine import Engine
    from tests.property.simulation.world import World

TRAFFIC_S = (0.0, 0.002, 0.05)  # before the node is lost
GONE_S = (
    75.0  # by then what is known of it has ended: longer than tombstones, leases and all that is repeated
)
BACK_S = 45.0  # by then its engines are registered and joined again, and homes have forgotten former members
PULL_S = 14.0
LEASE_S = 50.0  # also where leases are short


class LostNode:
    """Has a node end while it reads and is read, looks at the others later, and has it come back."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._agenda = world.agenda
        self._rng = rng
        self._name = rng.choice(world.node_names)
        self._lost = [e for e in world.engines if self._name in (p.node_name for p in e.processes)]

    def check(self) -> None:
        """Run it. Raises Violation."""
        self._agenda.note("lost-node", self._name)
        self._have_traffic()
        self._lose()
        self._agenda.run(self._agenda.now + GONE_S)
        self._check_forgotten()
        self._come_back()
        for source in self._world.sources:
            self._check_transfer(source, self._rng.choice(self._world.sinks))

    def _have_traffic(self) -> None:
        """Have all sources publish, and engines pull."""
        oracle = self._world.oracle
        before = len(oracle.wanted)
        for source in self._world.sources:
            if (transfer := source.publish(2)) is not None:
                for sink in self._rng.sample(self._world.sinks, min(2, len(self._world.sinks))):
                    sink.pull(transfer, PULL_S)
        del oracle.wanted[before:]
        self._agenda.run(self._agenda.now + self._rng.choice(TRAFFIC_S))

    def _lose(self) -> None:
        """End all processes of the node, and what other nodes have of its engines."""
        self._world.kill_daemon(self._name)
        for engine in self._lost:
            engine.die()

    def _check_forgotten(self) -> None:
        found = [line for daemon in self._world.daemons.values() for line in daemon.leftovers()]
        endpoint = f"tcp://{self._name}:9441"
        for daemon in self._world.daemons.values():
            ranks = [r for engine in daemon.node.registry for r in engine.ranks.values()]
            boot = f"boot-{self._name}-"
            found += [
                f"{daemon.name}: rank {rank.spec.rank} of {rank.spec.key}, of a node that is gone"
                for rank in ranks
                if isinstance(rank, MemberRank) and rank.boot.startswith(boot)
            ]
            peer = daemon.node.peers._peers.get(endpoint)
            if peer is not None and (peer.boot is not None or peer.engines):
                found.append(f"{daemon.name}: {endpoint} is known, which is gone")
        if found:
            raise Violation("leaked", "; ".join(found), len(found))

    def _come_back(self) -> None:
        self._world.start_daemon(self._name)
        for engine in self._lost:
            engine.start()
        self._agenda.run(self._agenda.now + BACK_S)
        if not self._world.is_ready():
            raise Violation("violations", f"engines are not registered again after {self._name} is back")

    def _check_transfer(self, source: Engine, sink: Engine) -> None:
        """Have an engine pull a new transfer: it must arrive at the first attempt."""
        wanted = self._world.oracle.wanted
        before = len(wanted)
        transfer = source.publish(1, lease_s=LEASE_S)
        if transfer is None:
            raise Violation("violations", f"{source.engine_id} cannot publish after {self._name} is back")
        sink.pull(transfer, PULL_S)
        these, wanted[before:] = wanted[before:], []
        self._agenda.run(self._agenda.now + PULL_S + 2.0, lambda: all(one.is_delivered for one in these))
        if any(not one.is_delivered or one.attempts > 1 for one in these):
            text = (
                f"{transfer.transfer_id} from {source.engine_id} to {sink.engine_id} did not arrive at once"
            )
            raise Violation("violations", f"{text}, after {self._name} is back")
