"""A node that is gone without a word: what others know of it ends in time, and it may come back."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from kvxferd.core.ranks.rank import MemberRank
from tests.property.simulation.daemon import endpoint_of
from tests.property.simulation.next_transfers import PULL_S, NextTransfers
from tests.property.simulation.oracle import GRACE_S, Violation
from tests.property.simulation.world import SETTINGS

if TYPE_CHECKING:
    from tests.property.simulation.engine import Transfer
    from tests.property.simulation.world import World

TRAFFIC_S = (0.0, 0.002, 0.05)  # before the node is lost
GONE_S = (
    75.0  # by then what is known of it has ended: longer than tombstones, leases and all that is repeated
)
BACK_S = 45.0  # by then its engines are registered and joined again, and homes have forgotten former members
LONG_PULL_S = 40.0  # of the lost node's transfers: their pulls end before
# By then a daemon has given up a node to which it sends requests that may wait there.
GIVEN_UP_S = SETTINGS.silent_after_s + 2 * SETTINGS.resend_s + GRACE_S


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
        self._check_given_up()
        self._agenda.run(self._agenda.now + GONE_S)
        self._check_forgotten()
        self._come_back()
        transfers = NextTransfers(self._world, self._rng)
        for source in self._world.sources:
            transfers.check_transfer(source, [self._rng.choice(self._world.sinks)], has_hardship=False)

    def _have_traffic(self) -> None:
        """Have all sources publish, and engines pull."""
        oracle = self._world.oracle
        before = len(oracle.wanted)
        for source in self._world.sources:
            if (transfer := source.publish(2)) is not None:
                for sink in self._rng.sample(self._world.sinks, min(2, len(self._world.sinks))):
                    sink.pull(transfer, LONG_PULL_S if self._is_of_lost(transfer) else PULL_S)
        del oracle.wanted[before:]
        self._agenda.run(self._agenda.now + self._rng.choice(TRAFFIC_S))

    def _lose(self) -> None:
        """End all processes of the node, and what other nodes have of its engines."""
        self._world.kill_daemon(self._name)
        for engine in self._lost:
            engine.die()

    def _is_of_lost(self, transfer: Transfer) -> bool:
        """Whether the lost node's daemon grants it."""
        return transfer.ref is not None and transfer.ref.endpoint == endpoint_of(self._name)

    def _check_given_up(self) -> None:
        """Pulls that wait for the lost node end long before their deadlines: it is silent."""
        oracle, transfer_of = self._world.oracle, self._world.transfer_of
        waiting = [pull for pull in oracle.open_pulls if self._is_of_lost(transfer_of[pull])]
        self._agenda.run(self._agenda.now + GIVEN_UP_S)
        if late := [f"{pull.ticket} of {pull.process.name}" for pull in waiting if not pull.ended]:
            raise Violation("hung", f"pulls wait for {self._name}, which is gone: {late}", len(late))

    def _check_forgotten(self) -> None:
        found = [line for daemon in self._world.daemons.values() for line in daemon.leftovers()]
        endpoint = endpoint_of(self._name)
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
