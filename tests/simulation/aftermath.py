"""After all faults: transfers arrive although something stands in their way, and a lost node is given up."""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

from kvxferd.mover.transport.staging_source import CHUNK_REPLY_TIMEOUT_S
from tests.simulation.checks import Check, Violation
from tests.simulation.engine import MAX_DRAWS, Engine, Pull, Transfer
from tests.simulation.fabric import Moment, SimTransport
from tests.simulation.reasons import SILENT_S
from tests.simulation.world import PlannedMessage

if TYPE_CHECKING:
    from tests.simulation.world import World

PULL_S = 15.0  # enough for a transfer at rest
HARD_PULL_S = 40.0  # enough for each hardship
LONG_READ_S = 9.0  # longer than a lease, and than a grant's
LONG_PREFILL_S = 8.0  # longer than a peer may be silent to which a request for a grant was sent
LEASE_S = 60.0
QUEUED_LEASE_S, QUEUE_S = 4.0, 12.0  # a queue of three leases: less than `engine.MAX_HOLD_S`
AWAY_S = (0.01, 1.0)
LONG_PULL_S = 90.0  # of a lost node's transfers: their pulls end before
REPEATED_S = 281.0  # after which transfers that have ended, or were never published, make room for others
GONE_S = 75.0  # by then nothing is known of it: longer than leases and all that is repeated
BACK_S = 60.0


class Hardship(StrEnum):
    """What stands in a transfer's way."""

    NONE = "nothing"
    SOURCE_RESTARTS = "its source's daemon restarts"
    SINK_RESTARTS = "its reader's daemon restarts"
    MOVERS_DIE = "its source's movers die"
    READERS_MOVER_DIES = "a mover of its reader dies as it reads"
    MESSAGES = "messages are lost"
    LONG_PREFILL = "its source takes long to write it"
    LONG_READ = "its read takes long"
    READ_FAILS = "its read fails"
    CONNECTION_BREAKS = "the connection breaks by which it is read"
    LONG_QUEUE = "its reader's queue is longer than its lease"
    READER_DIES = "a reader dies in whose queue it was for longer than its lease"


class Loss(StrEnum):
    """How a node is lost."""

    IS_GONE = "is gone"
    STANDS_STILL = "stands still"
    IS_CUT_OFF = "is cut off"


# Those in which no pull has to be repeated.
AT_ONCE = frozenset({
    Hardship.NONE, Hardship.READERS_MOVER_DIES, Hardship.LONG_PREFILL, Hardship.LONG_READ,
    Hardship.LONG_QUEUE, Hardship.READER_DIES, Hardship.READ_FAILS,
})  # fmt: skip
ENDS_MOVERS = frozenset({
    Hardship.SOURCE_RESTARTS, Hardship.SINK_RESTARTS, Hardship.MOVERS_DIE, Hardship.READERS_MOVER_DIES,
})  # fmt: skip
JOINED_S = 14.0  # by then a home has the ranks of a node whose daemon was restarted

Wait = Callable[..., bool]


class Aftermath:
    """What is tried when all is at rest. `wait` lets the world go on until something is true, or so long."""

    def __init__(self, world: World, rng: random.Random, wait: Wait) -> None:
        self._world, self._rng, self._wait = world, rng, wait
        self._is_home_behind = True  # it may name movers of another node that are gone
        self._is_full = self._may_be_full

    @property
    def _may_be_full(self) -> bool:
        """Whether tables may be full of what has ended, or was reported and never published."""
        traits = self._world.traits
        return traits.has_low_limits or bool({"ended_transfers", "early_ready"} & {*traits.low_numbers})

    def check_works_again(self, hardships: list[Hardship]) -> None:
        """A transfer of each source arrives, of each at one of these hardships."""
        for source in self._world.sources:
            self.check_arrives(source, self._rng.choice(self._world.sinks), self._rng.choice(hardships))

    def check_arrives(self, source: Engine, sink: Engine, hardship: Hardship) -> None:
        """A transfer arrives: at the first attempt, where its pull need not fail."""
        world = self._world
        if self._is_full:
            self._wait(lambda: False, REPEATED_S, REPEATED_S)
        self._wait(lambda: world.is_ready, BACK_S)
        if self._is_home_behind:
            self._wait(lambda: False, JOINED_S)
        if hardship is Hardship.SINK_RESTARTS and {*source.shape.nodes} & {*sink.shape.nodes}:
            hardship = Hardship.SOURCE_RESTARTS  # it has ranks of the source
        self._is_home_behind, self._is_full = hardship in ENDS_MOVERS, False
        transfer = self._publish(source)
        world.tell("aftermath", f"{transfer.transfer_id} of {source.shape.name}: {hardship.value}")
        before = len(world.wanted)
        limit_s = PULL_S if hardship is Hardship.NONE else HARD_PULL_S
        self._make_hard(source, sink, hardship)
        if hardship in (Hardship.LONG_QUEUE, Hardship.READER_DIES):
            self._have_wait(sink, transfer, hardship is Hardship.READER_DIES)
        if not sink.is_ready:
            self._wait(lambda: sink.is_ready, BACK_S)
        sink.pull(transfer, limit_s)

        def is_done() -> bool:
            new = world.wanted[before:]
            return len(new) == sink.num_ranks and all(wanted.is_delivered for wanted in new)

        if not self._wait(is_done, limit_s + 1):
            what = f"{transfer.transfer_id} of {source.shape.name} does not arrive at {sink.shape.name}"
            raise Violation(Check.WORKS_AGAIN, f"{what}, although no more than {hardship.value}")
        is_busy = world.traits.may_be_busy  # of ranks that ask at once some are turned away
        is_first = all(wanted.attempts == 1 for wanted in world.wanted[before:])
        if hardship in AT_ONCE and not is_busy and not is_first:
            raise Violation(Check.WORKS_AGAIN, f"{sink.shape.name} had to pull twice at rest")

    def _publish(self, source: Engine) -> Transfer:
        drawn = (source.publish(1) for _ in range(MAX_DRAWS))
        transfer = next((one for one in drawn if one is not None), None)
        if transfer is None:
            raise Violation(Check.WORKS_AGAIN, f"{source.shape.name} cannot publish at rest")
        transfer.lease_s = LEASE_S
        return transfer

    def _make_hard(self, source: Engine, sink: Engine, hardship: Hardship) -> None:
        world, rng = self._world, self._rng
        match hardship:
            case Hardship.SOURCE_RESTARTS:
                self._wait(lambda: False, 0.05)  # its publish has arrived
                self._restart(source.shape.nodes[0])
            case Hardship.SINK_RESTARTS:
                self._restart(sink.shape.nodes[0])
            case Hardship.MOVERS_DIE:
                for mover in world.movers_of(source.shape.nodes[0]):
                    world.kernel.kill(mover)
            case Hardship.READERS_MOVER_DIES:
                world.planned_at[Moment.READ].append((rng.choice((0.0, 0.00005, 0.0002)), self._kill_mover))
            case Hardship.MESSAGES:
                world.planned_messages += [PlannedMessage(None) for _ in range(rng.choice((1, 2, 5)))]
            case Hardship.LONG_PREFILL:
                for worker in source.ranks:
                    world.kernel.stop(worker.process)
                    world.expectations.disturb(LONG_PREFILL_S, worker)
                    world.after(LONG_PREFILL_S, world.kernel.resume, worker.process)
            case Hardship.LONG_READ:
                world.planned_at[Moment.READ].append((0.0, self._stall))
            case Hardship.READ_FAILS:
                world.planned_at[Moment.READ].append((0.0, lambda mover: mover.fail_one_read(settled=True)))
            case Hardship.CONNECTION_BREAKS:
                world.planned_at[Moment.READ].append((0.0, self._break_connection))

    def _have_wait(self, sink: Engine, transfer: Transfer, dies: bool) -> None:
        """Have an engine announce a transfer and not come for it; it dies where another is to read."""
        world, transfer.lease_s = self._world, QUEUED_LEASE_S
        others = [engine for engine in world.sinks if engine is not sink and engine.is_ready]
        reader = self._rng.choice(others) if dies and others else sink
        self._wait(lambda: transfer.ref is not None, PULL_S)
        for worker in reader.ranks:
            worker.do(partial(worker.prepare, transfer))
        self._wait(lambda: False, QUEUE_S)
        if reader is not sink:
            reader.die()
            world.after(0.3, reader.start)

    def _kill_mover(self, transport: SimTransport) -> None:
        if transport.process.parent is not self._world.kernel.host:  # else it is a thread of a rank
            self._world.kernel.kill(transport.process)

    @staticmethod
    def _break_connection(transport: SimTransport) -> None:
        for agent in transport.agents_read_from:
            transport.lose_connection(agent)

    def _stall(self, transport: SimTransport) -> None:
        transport.stalls_until = self._world.kernel.now + LONG_READ_S

    def _restart(self, node: str) -> None:
        away_s = self._rng.choice(AWAY_S)
        self._world.kill_daemon(node)
        self._world.expectations.disturb(away_s, node)
        self._world.after(away_s, self._world.start_daemon, node)

    def check_lost_node(self) -> None:
        """A node is gone without a word while it is read, and waited for; it is given up, and comes back."""
        world, rng = self._world, self._rng
        lost = rng.choice(sorted({source.shape.nodes[0] for source in world.sources}))
        how = rng.choice([*Loss])
        world.tell("aftermath", f"{lost} {how.value}")
        of_lost = [engine for engine in world.engines if lost in engine.shape.nodes]
        readers = [sink for sink in world.sinks if sink not in of_lost]
        for source in world.sources:
            if source not in of_lost or not readers:
                continue
            if (transfer := source.publish(2)) is not None:
                rng.choice(readers).pull(transfer, LONG_PULL_S)
            for worker in source.ranks:  # what they have written is heard of too late
                if worker is not source.publisher:
                    world.kernel.stop(worker.process)
        world.kernel.sleep(rng.choice((0.0005, 0.003, 0.05, 3.0)))
        # A staged read that is posted waits for its source's mover.
        limit_s = SILENT_S + (CHUNK_REPLY_TIMEOUT_S if world.traits.placement == "staged" else 0.0)
        world.expectations.disturb(limit_s + GONE_S, *world.node_names)
        if how is Loss.STANDS_STILL:
            for process in world.processes_of(lost):
                world.kernel.stop(process)
        else:
            self._cut_off(lost)
        if how is Loss.IS_GONE:
            self._end(lost, of_lost)
        # Some are tried again, and given up again. A read of a mover that stands still has its deadline: that
        # of the node, or of a worker that was stopped.
        granted = {} if how is Loss.IS_GONE else world.words.granted
        pulls = list(world.open_pulls)

        def waiting() -> list[Pull]:  # a home on another node may grant meanwhile
            return [pull for pull in pulls if not pull.ended and pull.transfer.name not in granted]

        if not self._wait(lambda: not waiting(), limit_s):
            who = [f"{pull.worker.name} of {pull.transfer.transfer_id}" for pull in waiting()]
            raise Violation(Check.SILENT, f"{lost} {how.value}, and its readers wait on: {who}")
        self._cut_off(lost)
        self._end(lost, of_lost)
        self._wait(lambda: False, GONE_S + 1.0)
        self._is_full = self._may_be_full
        world.start_daemon(lost)
        for engine in of_lost:
            if not engine.is_up:
                engine.start()
        if not self._wait(lambda: world.is_ready, BACK_S):
            raise Violation(Check.REGISTERED, f"{lost} is back, and an engine is not registered")

    def _cut_off(self, lost: str) -> None:
        world = self._world
        for other in world.node_names:
            if other != lost:
                world.network.sever(world.host_of(lost), world.host_of(other), GONE_S)

    def _end(self, lost: str, engines: list[Engine]) -> None:
        for engine in engines:
            if engine.is_up:
                engine.die()
        for process in self._world.processes_of(lost):
            self._world.kernel.kill(process)
