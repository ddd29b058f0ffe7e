"""Faults: what goes wrong, and to whom. Each is drawn before the episode and strikes at a pull."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kvxferd.client.registration import MemoryState
from kvxferd.core.ranks.local_ranks import REBIND_AFTER_S
from kvxferd.wire.common import BlockIds
from kvxferd.wire.peer import GrantReply
from tests.property.simulation.agenda import Actor
from tests.property.simulation.engine import Engine
from tests.property.simulation.mover import Mover
from tests.property.simulation.network import DELAYED, DOUBLED, LOST
from tests.property.simulation.oracle import Pull
from tests.property.simulation.process import Process

if TYPE_CHECKING:
    from tests.property.simulation.daemon import Daemon
    from tests.property.simulation.world import World

T = TypeVar("T")


@dataclass(frozen=True)
class Fault:
    """Strikes so long after the pull of that number has started. `seed` decides on whom and how."""

    pull: int
    delay_s: float
    kind: str
    seed: int


class Faults:
    """Makes faults happen. `struck(kind)` is called when one does."""

    def __init__(self, world: World, struck: Callable[[str], None]) -> None:
        self._world = world
        self._struck = struck
        self.is_over = False

    def strike(self, fault: Fault) -> None:
        """Have a fault happen, if there is anything that it can happen to."""
        if self.is_over:
            return
        act = getattr(self, "_" + fault.kind.replace("-", "_"))
        act(random.Random(fault.seed))

    def _count(self, kind: str, whom: str) -> None:
        self._world.agenda.note("fault", f"{kind} {whom}")
        self._struck(kind)

    # --- messages between nodes

    def _plan(self, rng: random.Random, kind: str, seconds: float) -> None:
        sender, receiver = rng.sample(self._world.node_names, 2)
        link = None if rng.random() < 0.7 else (sender, receiver)

        def strike() -> None:
            if not self.is_over:
                self._struck(kind)

        self._world.network.planned[link].append((kind, seconds, strike))

    def _lose_message(self, rng: random.Random) -> None:
        self._plan(rng, LOST, 0.0)

    def _lose_grant(self, rng: random.Random) -> None:
        """The next grant that is sent is lost, or a part of the block ids that come before it."""
        kind = rng.choice((GrantReply, BlockIds))

        def strike() -> None:
            if not self.is_over:
                self._struck("lose-grant")

        self._world.network.to_lose[kind].append(strike)

    def _double_message(self, rng: random.Random) -> None:
        self._plan(rng, DOUBLED, rng.choice((0.0, 0.01, 1.0, 10.0)))

    def _delay_message(self, rng: random.Random) -> None:
        self._plan(rng, DELAYED, rng.choice((0.003, 0.05, 0.5, 3.0)))

    def _cut_peer(self, rng: random.Random) -> None:
        sender, receiver = rng.sample(self._world.node_names, 2)
        if daemon := self._world.daemons.get(sender):
            self._count("cut-peer", f"{sender}->{receiver}")
            self._world.network.cut(daemon, receiver)

    def _partition(self, rng: random.Random) -> None:
        sender, receiver = rng.sample(self._world.node_names, 2)
        links = [(sender, receiver), (receiver, sender)][: rng.choice((1, 2))]
        self._count("partition", f"{links}")
        for link in links:
            self._world.network.partitions[link] += 1
            self._world.agenda.after(rng.choice((0.05, 0.5, 2.0)), self._heal, link)

    def _heal(self, link: tuple[str, str]) -> None:
        self._world.network.partitions[link] -= 1

    # --- messages on a node

    def _cut_worker(self, rng: random.Random) -> None:
        process = self._process(rng)
        if process is not None and process.connection is not None and process.connection.is_open:
            self._count("cut-worker", process.name)
            process.connection.cut()

    def _cut_frame(self, rng: random.Random) -> None:
        """One end of a connection reads half a frame, while the other knows of nothing."""
        process = self._process(rng)
        if process is not None and process.connection is not None and process.connection.is_open:
            self._count("cut-frame", process.name)
            connection = process.connection
            rng.choice((connection.cut_at_daemon, connection.cut_at_process))()

    def _delay_worker(self, rng: random.Random) -> None:
        process = self._process(rng)
        if process is not None and (connection := process.connection) is not None:
            self._count("delay-worker", process.name)
            rng.choice((connection.up, connection.down)).delay(rng.choice((0.01, 0.2)))

    def _delay_mover(self, rng: random.Random) -> None:
        mover = self._pick(rng, [m for d in self._world.daemons.values() for m in d.movers.values()])
        if mover is not None:
            self._count("delay-mover", mover.name)
            rng.choice((mover.to_daemon, mover.from_daemon)).delay(rng.choice((0.01, 0.2, 1.5, 4.0)))

    # --- processes

    def _kill_mover(self, rng: random.Random) -> None:
        if rng.random() < 0.5:
            self._at_read(rng, "kill-mover", lambda mover: mover.die("a fault"))
            return
        mover = self._pick(rng, [m for d in self._world.daemons.values() for m in d.movers.values()])
        if mover is not None:
            self._count("kill-mover", mover.name)
            mover.die("a fault")

    def _kill_forkserver(self, rng: random.Random) -> None:
        forkservers = [d.pool.forkserver for d in self._world.daemons.values()]
        forkserver = self._pick(rng, [one for one in forkservers if one is not None and one.is_alive])
        if forkserver is not None:
            self._count("kill-forkserver", forkserver.name)
            forkserver.kill()

    def _stop_forkserver(self, rng: random.Random) -> None:
        forkservers = [d.pool.forkserver for d in self._world.daemons.values()]
        living = [one for one in forkservers if one is not None and one.is_alive]
        self._stop(rng, "stop-forkserver", living, (0.02, 0.3, 4.0))

    def _at_read(self, rng: random.Random, kind: str, act: Callable[[Mover], None]) -> None:
        """Have it happen to the next mover that posts a read, while that may be under way."""

        def strike(mover: Mover) -> None:
            if not self.is_over and mover.is_alive and not mover.is_stopped:
                self._count(kind, mover.name)
                act(mover)

        self._world.planned_at_read.append((rng.choice((0.0, 0.00005, 0.0002, 0.002)), strike))

    def _stop_mover(self, rng: random.Random) -> None:
        movers = [m for d in self._world.daemons.values() for m in d.movers.values() if m.is_alive]
        self._stop(rng, "stop-mover", movers, (0.02, 0.3, 4.0, 6.0))

    def _kill_daemon(self, rng: random.Random) -> None:
        self._kill_daemon_of(rng, "kill-daemon", self._world.node_names)

    def _kill_daemon_of(self, rng: random.Random, kind: str, names: list[str]) -> None:
        name = self._pick(rng, [name for name in names if name in self._world.daemons])
        if name is not None:
            self._count(kind, name)
            self._world.kill_daemon(name)
            self._world.agenda.after(rng.choice((0.01, 0.1, 1.0)), self._world.start_daemon, name)

    def _stop_daemon(self, rng: random.Random) -> None:
        self._stop(rng, "stop-daemon", list(self._world.daemons.values()), (0.02, 0.3, 2.0, 12.0))

    def _stop_worker(self, rng: random.Random) -> None:
        processes = [p for e in self._world.engines for p in e.processes if p.is_alive]
        self._stop(rng, "stop-worker", processes, (0.02, 0.3, 2.0))

    def _stop(
        self, rng: random.Random, kind: str, actors: Sequence[Actor], seconds: tuple[float, ...]
    ) -> None:
        actor = self._pick(rng, [actor for actor in actors if not actor.is_stopped])
        if actor is not None:
            self._count(kind, actor.name)
            actor.stop()
            self._world.agenda.after(rng.choice(seconds), actor.resume)

    def _kill_engine(self, rng: random.Random) -> None:
        engine = self._pick(rng, [engine for engine in self._world.engines if engine.is_up])
        if engine is not None:
            self._count("kill-engine", engine.engine_id)
            engine.die()
            self._world.agenda.after(rng.choice((0.01, 0.3)), engine.start)

    def _replace_rank(self, rng: random.Random) -> None:
        engine = self._pick(rng, [e for e in self._world.engines if e.is_up])
        if engine is None:
            return
        ranks = [
            i for i, p in enumerate(engine.ranks) if not (engine.shape.is_source and p is engine.publisher)
        ]
        if ranks:
            tp_rank = rng.choice(ranks)
            self._count("replace-rank", engine.ranks[tp_rank].name)
            engine.replace_rank(tp_rank)

    def _scale(self, rng: random.Random) -> None:
        """A generation of an engine with another number of ranks takes over, while the one before runs."""
        engine = self._pick(rng, [engine for engine in self._world.engines if engine.is_usable])
        if engine is None:
            return
        self._count("scale", engine.engine_id)
        home, *_ = engine.shape.node_names
        if rng.random() < 0.3:
            home = rng.choice(self._world.node_names)
        others = [rng.choice((home, home, *self._world.node_names)) for _ in range(2 - engine.shape.tp_size)]
        engine.scale((home, *others), rng.choice((0.0, 0.02, 0.3, 2.0)))

    def _kill_member(self, rng: random.Random) -> None:
        """A daemon dies that has a rank of an engine whose home is elsewhere."""
        spanning = [engine.shape.node_names for engine in self._world.engines if engine.shape.spans_nodes]
        members = [name for home, *others in spanning for name in others if name != home]
        if members:
            self._kill_daemon_of(rng, "kill-member", members)
        else:
            self._kill_daemon(rng)

    # --- nodes

    def _no_descriptors(self, rng: random.Random) -> None:
        """A daemon or a worker has no descriptor left."""
        actor = rng.choice((self._pick(rng, list(self._world.daemons.values())), self._process(rng)))
        if actor is not None and actor.has_descriptors:
            self._count("no-descriptors", actor.name)
            actor.has_descriptors = False
            self._world.agenda.after(rng.choice((0.02, 0.3, 2.0)), self._give_descriptors, actor)

    @staticmethod
    def _give_descriptors(actor: Daemon | Process) -> None:
        actor.has_descriptors = True

    def _jump_clock(self, rng: random.Random) -> None:
        """A node's clock is later at once, by more than some timers and less than others."""
        name = rng.choice(self._world.node_names)
        self._count("jump-clock", name)
        self._world.jump_clock(name, rng.choice((0.1, 1.0, 5.0, 30.0)))

    def _reuse_address(self, rng: random.Random) -> None:
        """A daemon is away, and the daemon of another node answers at its address."""
        away, tenant = rng.sample(self._world.node_names, 2)
        if away not in self._world.daemons or away in self._world.network.tenants:
            return
        self._count("reuse-address", f"{away} by {tenant}")
        self._world.network.tenants[away] = tenant
        self._world.kill_daemon(away)
        self._world.agenda.after(rng.choice((0.01, 0.3, 3.0)), self._return_to_address, away)

    def _return_to_address(self, node_name: str) -> None:
        del self._world.network.tenants[node_name]
        self._world.start_daemon(node_name)

    # --- memory

    def _sleep(self, rng: random.Random) -> None:
        self._put_to_sleep(rng, "sleep")

    def _sleep_without_daemon(self, rng: random.Random) -> None:
        """A rank sleeps and wakes while its daemon is away, is killed, or comes back."""
        self._put_to_sleep(rng, "sleep-without-daemon")

    def _put_to_sleep(self, rng: random.Random, kind: str) -> None:
        awake = [(e, p) for e in self._world.engines if e.is_usable for p in e.ranks]
        publishing = [(engine, process) for engine, process in awake if engine.transfers]
        working = [(engine, process) for engine, process in awake if engine.num_working]
        chosen = rng.choices((awake, publishing, working or publishing), (3, 2, 2))[0]
        found = self._pick(rng, chosen)
        if found is None:
            return
        engine, process = found
        self._count(kind, process.name)
        agenda = self._world.agenda
        delay = 0.0
        if kind == "sleep-without-daemon":
            if process.node_name in self._world.daemons:
                self._world.kill_daemon(process.node_name)
            agenda.after(rng.choice((0.01, 0.1, 0.6)), self._world.start_daemon, process.node_name)
            delay = rng.choice((0.0, 0.002, rng.uniform(0.0, 0.8)))
        wake_s = rng.choice((0.0005, 0.002, 0.05, 0.5))
        if kind == "sleep-without-daemon" and rng.random() < 0.6:  # while the registration is under way
            delay = rng.choice((0.0, 0.0005, 0.002, 0.01))
            process.on_registering = partial(process.after, delay, self._suspend, engine, process, wake_s)
        else:
            process.after(delay, self._suspend, engine, process, wake_s)

    def _sleep_engine(self, rng: random.Random) -> None:
        """All ranks of an engine sleep at once, and wake one after another."""
        engine = self._pick(rng, [e for e in self._world.engines if e.is_usable])
        if engine is None:
            return
        self._count("sleep-engine", engine.engine_id)
        wake_s = rng.choice((0.0005, 0.002, 0.05, 0.5))
        for process in engine.ranks:
            process.after(rng.choice((0.0, 0.0001)), self._suspend, engine, process, wake_s)

    def _sleep_when_offered(self, rng: random.Random) -> None:
        """A rank sleeps when it is offered a mover, and its daemon dies a moment later."""
        found = self._pick(rng, [(e, p) for e in self._world.engines if e.is_usable for p in e.ranks])
        if found is None:
            return
        engine, process = found
        self._count("sleep-when-offered", process.name)
        wake_s = rng.choice((0.002, 0.5))

        def sleep() -> None:
            process.after(rng.choice((0.0, 0.0002)), self._suspend, engine, process, wake_s)
            if rng.random() < 0.5 and process.node_name in self._world.daemons:
                delay_s = rng.choice((0.0001, 0.0005, 0.002))
                self._world.agenda.after(delay_s, self._restart, process.node_name)

        process.on_offered = sleep
        movers = [mover for mover in process.movers if mover.is_alive]
        if rng.random() < 0.5:
            self._restart(process.node_name)
        elif movers:
            movers[-1].die("so that another is offered")

    def _restart(self, name: str) -> None:
        if name in self._world.daemons:
            self._world.kill_daemon(name)
            self._world.agenda.after(0.01, self._world.start_daemon, name)

    def _suspend(self, engine: Engine, process: Process, wake_s: float) -> None:
        if (
            process.session.registration.memory_state is MemoryState.SHARED
            and process.session.close_reason is None
        ):
            engine.sleep(process)
        process.after(wake_s, self._wake, engine, process)

    def _wake(self, engine: Engine, process: Process) -> None:
        if process.session.registration.memory_state is MemoryState.SHARED:
            return
        if not engine.wake(process):
            process.after(0.003, self._wake, engine, process)

    # --- requests

    def _cancel(self, rng: random.Random) -> None:
        pulls = [p for p in self._world.oracle.open_pulls if not p.process.is_stopped]
        pull = self._pick(rng, pulls)
        if pull is not None:
            self._count("cancel", f"{pull.process.name} {pull.ticket}")
            pull.process.engine.cancel(pull)

    def _abandon(self, rng: random.Random) -> None:
        pull = self._pick(rng, [p for p in self._world.oracle.open_pulls if not p.process.is_stopped])
        if pull is not None:
            self._count("abandon", f"{pull.process.name} {pull.ticket}")
            pull.process.engine.abandon(pull.process, self._world.transfer_of[pull])

    def _lose_reader(self, rng: random.Random) -> None:
        """An engine that reads a transfer with others abandons it, or dies."""
        shared = [p for p in self._world.oracle.open_pulls if self._world.transfer_of[p].num_readers > 1]
        pull = self._pick(rng, [p for p in shared if p.process.engine.is_usable])
        if pull is None:
            self._abandon(rng)
            return
        engine = pull.process.engine
        self._count("lose-reader", engine.engine_id)
        if rng.random() < 0.5:
            engine.abandon(pull.process, self._world.transfer_of[pull])
        else:
            engine.die()
            self._world.agenda.after(rng.choice((0.01, 0.3)), engine.start)

    def _unpublish(self, rng: random.Random) -> None:
        live = [(e, t) for e in self._world.sources if e.is_usable for t in e.transfers.values()]
        found = self._pick(rng, live)
        if found is not None:
            self._count("unpublish", found[1].transfer_id)
            found[0].unpublish(found[1])

    def _republish(self, rng: random.Random) -> None:
        """A scheduler uses a transfer id a second time, which must be refused even when that is over."""
        usable = [engine for engine in self._world.sources if engine.is_usable]
        over = [(e, t) for e in usable for t in e.past if t.publisher is e.publisher and t.uses_up_its_id]
        live = [(e, t) for e in usable for t in e.transfers.values()]
        found = self._pick(rng, over if over and rng.random() < 0.5 else live)
        if found is not None:
            self._count("republish", found[1].transfer_id)
            found[0].republish(found[1])

    # --- reads

    def _lose_connection(self, rng: random.Random) -> None:
        """A connection breaks under a read, and maybe the next reads are refused: it is not back yet."""

        def lose(mover: Mover) -> None:
            if agents := mover.transport.inflight_agents:
                mover.transport.lose_connection(rng.choice(agents))
                mover.transport.num_to_refuse = rng.choice((0, 0, 1, 2))
                self._stall_others(rng, mover)

        self._at_read(rng, "lose-connection", lose)

    def _kill_mover_at_delivery(self, rng: random.Random) -> None:
        """A mover dies when the worker has what it was told, and the daemon has not."""

        def plan(mover: Mover) -> None:
            mover.dies_at_delivery = True

        self._at_read(rng, "kill-mover-at-delivery", plan)

    def _cancel_at_delivery(self, rng: random.Random) -> None:
        """A request is cancelled when its read is done, and nobody but its mover knows."""

        def plan(mover: Mover) -> None:
            mover.at_delivery = self._cancel_pull

        self._at_read(rng, "cancel-at-delivery", plan)

    @staticmethod
    def _cancel_pull(pull: Pull) -> None:
        if not pull.ended and pull.process.is_alive and not pull.process.is_stopped:
            pull.process.engine.cancel(pull)

    def _slow_cancel(self, rng: random.Random) -> None:
        """Requests are cancelled whose reads take long, or fail meanwhile in a way that proves nothing."""
        stall_s, cancel_s = rng.choice((0.5, 3.0, 12.0)), rng.choice((0.0, 0.0, 0.1, 1.0))
        fail_s = rng.choice((0.001, 0.01, 0.3, 1.0)) if rng.random() < 0.6 else None

        def slow(mover: Mover) -> None:
            mover.transport.stall(stall_s)
            for pull in self._world.oracle.open_pulls:
                if pull.process is mover.process:
                    self._world.agenda.after(cancel_s, self._cancel_pull, pull)
            if fail_s is not None:
                self._world.agenda.after(fail_s, mover.transport.fail_one_read)

        self._at_read(rng, "slow-cancel", slow)

    def _deadly_pull(self, rng: random.Random) -> None:
        """Every mover that is to read for a pull dies of it."""
        pull = self._pick(rng, [p for p in self._world.oracle.open_pulls if p.num_killed is None])
        if pull is not None:
            self._count("deadly-pull", f"{pull.process.name} {pull.ticket}")
            pull.num_killed = 0
            for mover in pull.process.movers:
                if mover.is_alive and mover.transport.inflight_agents:
                    mover.die("a fault")

    def _hang_mover(self, rng: random.Random) -> None:
        """A mover that reads hangs for longer than anybody waits for it."""

        def hang(mover: Mover) -> None:
            if mover.transport.inflight_agents:  # else nobody would miss it until it has the next pull
                mover.stop()
                self._world.agenda.after(60.0, mover.resume)

        self._at_read(rng, "hang-mover", hang)

    def _sleep_before_mover(self, rng: random.Random) -> None:
        """A rank sleeps while another mover is made for it."""
        found = self._pick(rng, [(e, p) for e in self._world.engines if e.is_usable for p in e.ranks])
        daemon = self._world.daemons.get(found[1].node_name) if found is not None else None
        if found is None or daemon is None:
            return
        engine, process = found
        self._count("sleep-before-mover", process.name)
        forkserver = daemon.pool.forkserver
        if forkserver is not None and forkserver.is_alive and not forkserver.is_stopped:
            forkserver.stop()
            self._world.agenda.after(rng.choice((0.02, 0.3, REBIND_AFTER_S + 0.3)), forkserver.resume)
        for handle in list(daemon.pool.handles.values()):  # the spare ones too
            handle.process.kill()
        # Another mover is requested `REBIND_AFTER_S` after the death of the last.
        delay_s = rng.choice((0.0005, 0.05, REBIND_AFTER_S + 0.01, REBIND_AFTER_S + 0.1))
        process.after(delay_s, self._suspend, engine, process, 0.5)

    def _late_acknowledgement(self, rng: random.Random) -> None:
        """A mover dies when it was offered; its worker hears late of the next, and acknowledges the first."""
        found = self._pick(rng, [(e, p) for e in self._world.engines if e.is_usable for p in e.ranks])
        if found is None:
            return
        _, process = found
        self._count("late-acknowledgement", process.name)

        def die() -> None:
            connection, mover = process.connection, process.last_offered
            if connection is not None and mover is not None:
                connection.up.delay(REBIND_AFTER_S + rng.choice((0.003, 0.02)))
                connection.down.delay(REBIND_AFTER_S + 0.3)
                mover.die("a fault")

        process.on_offered = die
        for mover in process.movers:
            mover.die("so that another is offered")

    def _slow_node(self, rng: random.Random) -> None:
        """Reads on a node take long, and meanwhile its daemon stops, or dies while its movers are stopped."""
        reading = [pull.process.node_name for pull in self._world.oracle.open_pulls]
        names = reading if reading and rng.random() < 0.5 else self._world.node_names
        daemon = self._world.daemons.get(rng.choice(names))
        if daemon is None or daemon.is_stopped:
            return
        self._count("slow-node", daemon.name)
        seconds = rng.choice((1.5, 3.0, 12.0))
        for mover in daemon.movers.values():
            mover.transport.stall(seconds)
        begins_s = rng.choice((0.0, 0.05, 1.0, 3.0))
        if rng.random() < 0.4:
            self._world.agenda.after(begins_s, self._stop_for, daemon, rng.choice((1.5, 4.0, 12.0)))
        else:
            self._world.agenda.after(begins_s, self._kill_under_movers, daemon, rng.random() < 0.7)

    def _stop_for(self, daemon: Daemon, seconds: float) -> None:
        if daemon.is_alive and not daemon.is_stopped:
            daemon.stop()
            self._world.agenda.after(seconds, daemon.resume)

    def _kill_under_movers(self, daemon: Daemon, stops: bool) -> None:
        """Kill a daemon. `stops`: its movers stop until reads have landed where a network card moves them.

        Their forkserver stops with them: its death would kill them.
        """
        if self._world.daemons.get(daemon.node_name) is not daemon:
            return
        movers = list(daemon.movers.values())
        until = max([self._world.agenda.now, *(mover.transport.stalls_until for mover in movers)]) + 0.5
        held: list[Actor | None] = [*movers, daemon.pool.forkserver]
        for process in held if stops else ():
            if process is not None and process.is_alive and not process.is_stopped:
                process.stop()
                self._world.agenda.at(until, process.resume)
        self._world.kill_daemon(daemon.node_name)
        self._world.agenda.after(0.01, self._world.start_daemon, daemon.node_name)

    def _stall_reads(self, rng: random.Random) -> None:
        """The reads of one mover take long, those too that it posts meanwhile."""
        seconds = rng.choice((0.5, 3.0, 12.0))
        self._at_read(rng, "stall-reads", lambda mover: mover.transport.stall(seconds))

    def _fail_read(self, rng: random.Random) -> None:
        def fail(mover: Mover) -> None:
            if mover.transport.fail_one_read():
                self._stall_others(rng, mover)

        self._at_read(rng, "fail-read", fail)

    @staticmethod
    def _stall_others(rng: random.Random, mover: Mover) -> None:
        """Have what else the mover reads take longer than a pull that has failed waits for it, or not."""
        if rng.random() < 0.3:
            mover.transport.stall(rng.choice((0.2, 1.0)))

    # --- whom

    def _process(self, rng: random.Random) -> Process | None:
        return self._pick(rng, [p for e in self._world.engines for p in e.processes if p.is_alive])

    @staticmethod
    def _pick(rng: random.Random, among: Sequence[T]) -> T | None:
        return rng.choice(among) if among else None


MESSAGE_KINDS = {LOST: 4, "lose-grant": 1, DOUBLED: 3, DELAYED: 4, "delay-worker": 1, "delay-mover": 1}
OTHER_KINDS = {
    "cut-peer": 2, "partition": 1, "cut-worker": 2, "kill-mover": 2, "stop-mover": 2, "kill-daemon": 1,
    "kill-forkserver": 1, "stop-forkserver": 1,
    "stop-daemon": 2, "stop-worker": 1, "kill-engine": 1, "replace-rank": 1, "scale": 1, "kill-member": 1,
    "sleep": 2, "sleep-without-daemon": 2, "cancel": 3, "abandon": 2, "lose-reader": 1, "unpublish": 3,
    "lose-connection": 2, "fail-read": 3, "stall-reads": 2, "republish": 1, "slow-node": 2,
    "cut-frame": 2, "no-descriptors": 1, "jump-clock": 1, "reuse-address": 1,
    "cancel-at-delivery": 2, "slow-cancel": 3, "deadly-pull": 1, "hang-mover": 1, "sleep-before-mover": 1,
    "late-acknowledgement": 1, "kill-mover-at-delivery": 1, "sleep-engine": 2, "sleep-when-offered": 1,
}  # fmt: skip
