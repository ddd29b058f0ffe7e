"""What must work once everything is at rest: a transfer of each source arrives at the first attempt.

Some have a hardship that a transfer must outlive: a daemon that restarts, a mover that dies, a read that
takes longer than its lease.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from enum import StrEnum

from kvxferd.client.session import SessionState
from kvxferd.core.ranks.local_ranks import REBIND_AFTER_S
from kvxferd.ids import EngineKey
from kvxferd.wire.peer import GrantReply
from tests.property.simulation.engine import MAX_ATTEMPTS, Engine, Transfer
from tests.property.simulation.mover import Mover
from tests.property.simulation.network import DELAYED, LOST
from tests.property.simulation.oracle import Violation
from tests.property.simulation.process import Process
from tests.property.simulation.told import joined_rank
from tests.property.simulation.world import World

START_S = 30.0  # by then every engine is registered
JOINED_S = 12.0  # by then a home has the ranks of a node whose daemon was restarted
NOTICED_S = 0.05  # by then clients know that their daemon is dead
REGISTERING_S = 2.0  # by then they have connected to the next one
LONG_LEASE_S = 50.0
LONG_READ_S = 9.0  # longer than a default lease and than a grant's
LONG_PREFILL_S = 8.0  # longer than a peer may be silent to which a request for a grant was sent
PULL_S = 14.0  # enough for each hardship
REPEATED_S = 5.0  # as RELEASE_S, where messages were lost
RELEASE_S = 1.0  # after the last reader has a transfer, by when all ranks are told
SETTLE_S = 12.0  # after the last transfer: longer than acknowledgements and polling linger
LEFT_S = REBIND_AFTER_S - 0.1  # after its mover's death, by when a rank has left its home
MAX_HARDSHIPS = 3  # of an episode's sources: the others' transfers have none
NUM_READERS = (1, 1, 1, 1, 2, 2, 3)


class Hardship(StrEnum):
    """What a transfer must outlive."""

    NONE = "none"
    SOURCE_RESTARTS = "source's daemon restarts"
    SINK_AWAY = "sink's daemon is away"
    LONG_READ = "long read"
    SINK_MOVERS_DIE = "sink's movers die"
    SOURCE_MOVERS_DIE = "source's movers die"
    LOST_MESSAGES = "messages are lost"
    LONG_PREFILL = "long prefill"


class NextTransfers:
    """Has each source publish once more, and raises Violation where a transfer does not arrive."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._agenda = world.agenda
        self._rng = rng
        self._is_joined = False  # no daemon or mover has died since all were

    def check(self) -> None:
        """Run them one after another, and wait until all is over."""
        world = self._world
        if not world.is_ready():
            states = [p.name for e in world.engines for p in e.processes if not e.is_ready]
            raise Violation("violations", f"not registered again: {states}")
        tried = self._rng.sample(range(len(world.sources)), min(MAX_HARDSHIPS, len(world.sources)))
        for index, source in enumerate(world.sources):
            first = index % len(world.sinks)
            sinks = world.sinks[first:] + world.sinks[:first]
            num_readers = self._rng.choice(NUM_READERS) if source is world.sources[0] else 1
            self.check_transfer(source, sinks[:num_readers], has_hardship=index in tried)
            if index in tried:
                self._check_cancelled(source, sinks[0])
                self._check_withdrawal(source)
        self._check_lost_member()
        self._agenda.run(self._agenda.now + SETTLE_S)
        if found := world.leftovers():
            raise Violation("leaked", "; ".join(found), len(found))

    def check_transfer(self, source: Engine, sinks: list[Engine], *, has_hardship: bool) -> None:
        """Have engines pull a transfer one after another, or abandon it: it is over with the last one."""
        self._wait_ready()
        hardship = self._draw_hardship(source, sinks) if has_hardship else Hardship.NONE
        self._agenda.note("hardship", f"{hardship} for {source.engine_id} to {sinks[0].engine_id}")
        lease_s = None if hardship is Hardship.LONG_READ else LONG_LEASE_S
        prefill_s = LONG_PREFILL_S if hardship is Hardship.LONG_PREFILL else None
        transfer = source.publish(len(sinks), lease_s, prefill_s)
        if transfer is None:
            raise Violation("violations", f"{source.engine_id} cannot publish at rest")
        if hardship is Hardship.SOURCE_RESTARTS:
            self._kill(source.shape.node_names)
            self._start(source.shape.node_names)
            self._wait_ready()
        for sink in sinks:
            what = f"{transfer.transfer_id} from {source.engine_id} to {sink.engine_id}"
            if transfer.is_over:
                raise Violation("violations", f"{what} is over before its last reader has it")
            if sink is sinks[0]:
                self._pull(source, sink, transfer, hardship, what)
                self._wait_ready()
            elif self._rng.random() < 0.5:
                sink.abandon(sink.ranks[-1], transfer)
            else:
                self._pull(source, sink, transfer, Hardship.NONE, what)
        release_s = REPEATED_S if hardship is Hardship.LOST_MESSAGES else RELEASE_S
        self._check_release(
            transfer, source, may_not_know=hardship is Hardship.SOURCE_RESTARTS, within_s=release_s
        )

    def _draw_hardship(self, source: Engine, sinks: list[Engine]) -> Hardship:
        sink = sinks[0]
        may = [Hardship.NONE, Hardship.SINK_MOVERS_DIE, Hardship.LOST_MESSAGES]
        # A home takes what a member published for lost with its mover; on a network card reads are in doubt.
        if not source.shape.spans_nodes and self._world.fabric.proves_over:
            may.append(Hardship.SOURCE_MOVERS_DIE)
        if not self._world.traits.has_short_leases:
            if source.can_grow:
                may.append(Hardship.LONG_PREFILL)
            if len(sinks) == 1:  # the lease ends then, whoever has not begun
                may.append(Hardship.LONG_READ)
            # A rank says ready again for as long as a default lease: members that join late may miss it.
            if not source.shape.spans_nodes:
                may.append(Hardship.SOURCE_RESTARTS)
        # A source that restarts forgets who has read, and a home waits for the silence of a former member.
        if not sink.shape.spans_nodes and not set(sink.shape.node_names) & set(source.shape.node_names):
            may.append(Hardship.SINK_AWAY)
        return self._rng.choice(may)

    def _pull(self, source: Engine, sink: Engine, transfer: Transfer, hardship: Hardship, what: str) -> None:
        """Have an engine's ranks pull; each must be delivered, at the first attempt."""
        wanted, agenda = self._world.oracle.wanted, self._agenda
        before = len(wanted)
        if hardship is Hardship.SINK_AWAY:
            self._kill(sink.shape.node_names)
        for mover in self._movers(sink.ranks):
            mover.transport.stall(_STALL_S.get(hardship, 0.0))
        if hardship is Hardship.LOST_MESSAGES:
            self._plan_losses()
        sink.pull(transfer, PULL_S)
        these, wanted[before:] = wanted[before:], []
        if hardship is Hardship.SINK_AWAY:
            self._start(sink.shape.node_names)
            if self._rng.random() < 0.5:  # dead again while its ranks register: no pull was sent
                agenda.run(agenda.now + REGISTERING_S, lambda: any(map(_registers, sink.ranks)))
                self._kill(sink.shape.node_names)
                self._start(sink.shape.node_names)
        elif hardship in (Hardship.SINK_MOVERS_DIE, Hardship.SOURCE_MOVERS_DIE):
            agenda.run(agenda.now + self._rng.choice((0.01, 0.1, 0.3)))
            for mover in self._movers(sink.ranks if hardship is Hardship.SINK_MOVERS_DIE else transfer.ranks):
                mover.die("a hardship")
            self._is_joined = False
        agenda.run(agenda.now + PULL_S + 2.0, lambda: all(one.is_delivered for one in these))
        self._world.network.forget_plans()
        if len(these) < len(sink.ranks) or not all(one.is_delivered for one in these):
            raise Violation("violations", f"the next transfer, {what}, did not arrive ({hardship})")
        if any(one.attempts > 1 for one in these):
            raise Violation("violations", f"the next transfer, {what}, was pulled again ({hardship})")

    def _plan_losses(self) -> None:
        """Have the next few messages be lost, or the grant alone."""
        network = self._world.network
        network.spares_parts = True
        if self._rng.random() < 0.5:
            network.to_lose[GrantReply].append(lambda: None)
            return
        for _ in range(self._rng.choice((1, 2, 3))):
            network.planned[None].append((LOST, 0.0, lambda: None))

    def _check_release(
        self, transfer: Transfer, source: Engine, *, may_not_know: bool, within_s: float
    ) -> None:
        told: list[Process] = [transfer.publisher] if may_not_know else source.processes

        def is_over() -> bool:
            return all(transfer.transfer_id in process.released for process in told)

        self._agenda.run(self._agenda.now + within_s, is_over)
        if not is_over():
            names = [process.name for process in told if transfer.transfer_id not in process.released]
            text = f"all have {transfer.transfer_id} of {source.engine_id}, and {names} are not told"
            raise Violation("violations", text)

    def _check_cancelled(self, source: Engine, sink: Engine) -> None:
        """Have an engine cancel its pulls, maybe before they are granted: its grants end."""
        self._wait_ready()
        transfer = source.publish(2, lease_s=LONG_LEASE_S)
        if transfer is None:
            raise Violation("violations", f"{source.engine_id} cannot publish at rest")
        wanted, agenda = self._world.oracle.wanted, self._agenda
        before = len(wanted)
        if self._rng.random() < 0.5:  # the grant is given back before it is asked for
            self._world.network.planned[None].append((DELAYED, 0.1, lambda: None))
        sink.pull(transfer, PULL_S)
        agenda.run(agenda.now + self._rng.choice((0.0, 0.0005, 0.001, 0.002)))
        for pull in [p for p in self._world.oracle.open_pulls if self._world.transfer_of[p] is transfer]:
            pull.wanted.attempts = MAX_ATTEMPTS
            sink.cancel(pull)
        agenda.run(agenda.now + RELEASE_S)
        self._world.network.forget_plans()
        del wanted[before:]
        tables = [daemon.node.published.table for daemon in self._world.daemons.values()]
        if left := [key for table in tables for key in table.by_grant]:
            text = f"pulls of {transfer.transfer_id} of {source.engine_id} are cancelled, and {left} hold it"
            raise Violation("leaked", text, len(left))
        if not transfer.is_over:
            source.unpublish(transfer)

    def _check_withdrawal(self, source: Engine) -> None:
        """Have an engine publish and withdraw while its daemon dies: the blocks are its own again."""
        self._wait_ready()
        transfer = source.publish(1, lease_s=LONG_LEASE_S)
        if transfer is None:
            raise Violation("violations", f"{source.engine_id} cannot publish at rest")
        self._agenda.run(self._agenda.now + self._rng.choice((0.0, 0.0002, 0.05)))
        source.unpublish(transfer)
        if self._rng.random() < 0.5:
            self._kill(source.publisher.node_name.split())
            self._start(source.publisher.node_name.split())
        self._agenda.run(self._agenda.now + RELEASE_S, lambda: transfer.is_over)
        if not transfer.is_over:
            text = f"{transfer.transfer_id} of {source.engine_id} was withdrawn, and is not released"
            raise Violation("violations", text)

    def _check_lost_member(self) -> None:
        """Have the mover of a rank die whose home is elsewhere: the home knows before another is there."""
        ranks = [(e, p) for e in self._world.engines for p in e.ranks if p.node_name != e.shape.node_names[0]]
        if not ranks:
            return
        self._wait_ready()
        engine, process = self._rng.choice(ranks)
        home, key = (
            self._world.daemons[engine.shape.node_names[0]],
            EngineKey(engine.engine_id, engine.generation),
        )
        assert process.spec is not None
        joined = joined_rank(home, key, process.spec.rank)
        for mover in self._movers([process]):
            mover.die("and its home must know")
        self._is_joined = False
        self._agenda.run(self._agenda.now + LEFT_S)
        if joined is not None and joined_rank(home, key, process.spec.rank) is joined:
            raise Violation("violations", f"{home.name} does not know that {process.name} has no mover")

    # --- hardships

    @staticmethod
    def _movers(ranks: list[Process]) -> list[Mover]:
        return [mover for rank in ranks for mover in rank.movers if mover.is_alive]

    def _wait_ready(self) -> None:
        self._agenda.run(self._agenda.now + START_S, self._world.is_ready)
        if not self._is_joined:
            self._agenda.run(self._agenda.now + JOINED_S)
            self._is_joined = True

    def _kill(self, node_names: Collection[str]) -> None:
        self._is_joined = False
        for name in dict.fromkeys(node_names):
            self._world.kill_daemon(name)
        self._agenda.run(self._agenda.now + NOTICED_S)

    def _start(self, node_names: Collection[str]) -> None:
        for name in dict.fromkeys(node_names):
            self._world.start_daemon(name)


def _registers(process: Process) -> bool:
    return process.session.state is SessionState.REGISTERING


_STALL_S = {
    Hardship.LONG_READ: LONG_READ_S,
    Hardship.SINK_MOVERS_DIE: 1.0,
    Hardship.SOURCE_MOVERS_DIE: 1.0,
}
