"""Faults: what goes wrong, and to whom. Each is drawn before the episode and strikes at a pull."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kvxferd.core.ranks.local_ranks import REBIND_AFTER_S
from kvxferd.daemon import STOP_S
from tests.simulation.checks import Check
from tests.simulation.engine import Engine
from tests.simulation.fabric import Moment, SimTransport
from tests.simulation.kernel import MAX_FD, Process
from tests.simulation.keys import READ_S
from tests.simulation.operators import Operator, cancel_transfer
from tests.simulation.transfers import Pull, Transfer
from tests.simulation.worker import Worker
from tests.simulation.world import DRAIN_S, DYING_S, PlannedMessage

if TYPE_CHECKING:
    from tests.simulation.world import World

T = TypeVar("T")

RARE_SHARE = 0.2  # of the episodes have few faults, with pulls that arrive between them
BURST_SHARE = 0.3  # of the faults are followed by others on the same victim
SPOILT_SHARE = 0.2  # of the lists of keys that change cannot be read
FORKED_AGAIN_S = 6.0  # within which a daemon has tried once more to fork a mover
# Of an episode. What they mapped stays mapped, also the stacks of their threads, and Linux allows 65,530
# mappings.
MAX_PROCESSES = 1_500
HELD_S = 8.0  # at most: for longer a daemon does not wait for its predecessor's movers, and ends


class Fault(msgspec.Struct, frozen=True):
    """Strikes so long after the pull of that number has started.

    `seed` decides how, and `victim` on whom: faults of one victim strike one node, and there the same
    engine, process or pull for as long as it lives.
    """

    pull: int
    delay_s: float
    kind: str
    seed: int
    victim: int


KINDS = {
    "lose-message": 8, "delay-message": 8, "cut-peer": 3, "sever": 2,
    "kill-daemon": 2, "stop-daemon": 3, "kill-mover": 3, "stop-mover": 3, "kill-forkserver": 1,
    "stop-forkserver": 1, "kill-engine": 1, "stop-worker": 2, "slow-process": 2,
    "cancel": 4, "abandon": 2, "unpublish": 4, "sleep": 3,
    "lose-connection": 3, "fail-read": 3, "stall-reads": 2, "refuse-reads": 1,
    "kill-mover-at-read": 2, "kill-node": 1, "cut-worker": 3, "few-bytes": 1, "no-descriptors": 2,
    "full-disk": 1, "torn-owners": 1, "replace-rank": 1, "scale": 1, "sleep-engine": 1, "hang-mover": 1,
    "cancel-at-read": 2, "unpublish-at-read": 2, "sleep-at-read": 2, "kill-source-at-read": 1,
    "cancel-at-delivery": 2, "kill-mover-at-delivery": 2, "sleep-at-binding": 1, "kill-mover-at-binding": 1,
    "deadly-pull": 1, "slow-cancel": 2, "lose-reader": 1, "lose-rare-message": 2,
    "kill-member": 1, "slow-node": 2, "stop-node": 1, "reuse-address": 1, "sleep-without-daemon": 2,
    "no-threads": 1, "no-processes": 1, "drain": 2, "send-elsewhere": 2, "kill-daemon-at-read": 2,
    "lose-daemon-in-doubt": 3, "cut-worker-at-read": 2,
    "stop-daemon-at-read": 2, "sleep-before-mover": 1, "republish": 1,
    "sleep-at-registering": 1, "operator-cancels-transfer": 2, "operator-cancels-pull": 2, "drop-peer": 1,
    "disown": 1, "kill-member-at-extend": 1, "refuse-binding": 1, "turn-away": 3,
}  # fmt: skip
RARE_MESSAGES = (  # of which one lost at random would seldom be
    "GrantReply", "RenewGrants", "GrantsRenewed", "ReleaseGrant", "Acknowledge",
    "AbandonTransfer", "RequestDone", "JoinRank", "LeaveRank", "RankReady", "RankPollingRequest",
    "TransferReleased",
)  # fmt: skip


def draw_faults(rng: random.Random, number: int) -> list[Fault]:
    """Draw which kinds an episode has, how often, and when each strikes."""
    share = rng.choice((0.1, 0.3, 0.6, 1.0))
    kinds = {kind: weight * rng.random() for kind, weight in KINDS.items() if rng.random() < share} or KINDS
    spread = rng.choice((0.25, 0.5, 0.5, 1.0))  # pulls a fault
    if rng.random() < RARE_SHARE:
        number, spread = number // 4, 2.0
    faults = []
    while len(faults) < number:
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        pull = 1 + int(rng.random() * number * spread)
        delay = rng.choice((0.0, 0.0005, 0.002, 0.01)) * rng.random()
        victim = rng.getrandbits(32)
        faults.append(Fault(pull, delay, kind, rng.getrandbits(32), victim))
        for _ in range(rng.randint(1, 3) if rng.random() < BURST_SHARE else 0):
            delay += rng.choice((0.0005, 0.01, 0.3, 1.0)) * rng.random()
            kind = rng.choices(list(kinds), list(kinds.values()))[0]
            faults.append(Fault(pull, delay, kind, rng.getrandbits(32), victim))
    return sorted(faults, key=lambda fault: (fault.pull, fault.delay_s))


class Faults:
    """Makes faults happen, on the host's thread. `struck(kind)` is called when one does."""

    def __init__(self, world: World, struck: Callable[[str], None]) -> None:
        self._world = world
        self._struck = struck
        self.is_over = False
        self._node = ""  # where the present fault strikes, if it can
        self._victim = 0  # and whom of those who are there

    def plan(self, fault: Fault) -> None:
        """Have a fault strike now, unless the episode has had so many that it needs no more."""
        if not self.is_over and len(self._world.kernel.processes) <= MAX_PROCESSES:
            self._node = random.Random(fault.victim).choice(self._world.node_names)
            self._victim = fault.victim
            getattr(self, "_" + fault.kind.replace("-", "_"))(random.Random(fault.seed))

    def heal(self) -> None:
        """Undo what would last."""
        world = self._world
        world.plan_nothing()
        world.fabric.num_bindings_to_refuse = 0
        world.network.give_back_addresses()
        for name in [*world.keys.turned_away]:
            world.keys.admit_all(name)
        for process in world.kernel.processes.values():
            process.slowness, process.max_fd, process.at_cut = 1.0, MAX_FD, None
            process.io_bytes, process.is_disk_full = world.traits.io_bytes, False
            process.can_start_threads = True
            if process.is_stopped:
                world.kernel.resume(process)
        for name in world.node_names:
            world.start_daemon(name)

    def _strike(self, kind: str, whom: str, lasting_s: float, *parties: object) -> None:
        self._world.tell("fault", f"{kind} {whom}")
        self._world.expectations.disturb(lasting_s, *parties)
        self._struck(kind)

    def _hit(self, process: Process, lasting_s: float) -> None:
        """Note that a fault strikes a process for so long; ends and stops are noted by the kernel."""
        self._world.kernel.on_strike(process, lasting_s)

    # --- messages between nodes

    def _message(self, rng: random.Random, kind: str, delay_s: float | None, name: str = "") -> None:
        one, other = self._two_nodes(rng)
        hosts = frozenset((self._world.host_of(one), self._world.host_of(other)))

        def strike() -> None:
            self._strike(kind, f"{one} {other}", delay_s or 0.0, one, other)

        between = hosts if rng.random() < 0.3 else None
        self._world.planned_messages.append(PlannedMessage(delay_s, strike, between, name))

    def _lose_message(self, rng: random.Random) -> None:
        self._message(rng, "lose-message", None)

    def _lose_rare_message(self, rng: random.Random) -> None:
        """The next message of one kind is lost, however long it takes to come."""
        self._message(rng, "lose-rare-message", None, rng.choice(RARE_MESSAGES))

    def _delay_message(self, rng: random.Random) -> None:
        self._message(rng, "delay-message", rng.choice((0.003, 0.05, 0.5, 3.0)))

    def _cut_peer(self, rng: random.Random) -> None:
        if (wire := self._pick(self._world.network.wires)) is not None:
            self._strike("cut-peer", f"{wire.dealer.host} {wire.router.host}", 0.0, *self._world.node_names)
            self._world.network.cut(wire)

    def _sever(self, rng: random.Random) -> None:
        one, other = self._two_nodes(rng)
        seconds = rng.choice((0.05, 0.5, 3.0, 12.0))
        self._strike("sever", f"{one} {other} for {seconds} s", seconds, one, other)
        self._world.network.sever(self._world.host_of(one), self._world.host_of(other), seconds)

    def _turn_away(self, rng: random.Random) -> None:
        """A node's list of keys is without another's, or is not to be read, for a while."""
        one, other = self._two_nodes(rng)
        world, keys, seconds = self._world, self._world.keys, rng.choice((0.6, 3.0, 8.0))
        if not world.traits.has_keys or one in keys.turned_away:
            return
        lasting_s = seconds + READ_S
        self._strike("turn-away", f"{other} at {one} for {seconds} s", lasting_s, *world.node_names)
        world.reasons.turned_away(world.host_of(one), world.host_of(other), lasting_s)
        if rng.random() < SPOILT_SHARE:
            keys.spoil(one)
        else:
            keys.turn_away(one, other)
        world.after(seconds, keys.admit_all, one)

    # --- processes

    def _kill_daemon(self, rng: random.Random) -> None:
        self._kill_daemon_of(rng, "kill-daemon", self._pick(self._living_nodes()), (0.01, 0.1, 4.0, 20.0))

    def _kill_member(self, rng: random.Random) -> None:
        """A daemon dies that has a rank of an engine whose home is elsewhere."""
        spanning = [engine.shape.nodes for engine in self._engines()]
        members = [name for home, *others in spanning for name in others if name != home]
        living = [name for name in members if not self._world.daemons[name].is_dead]
        self._kill_daemon_of(rng, "kill-member", self._pick(living), (0.01, 0.1, 1.0))

    def _kill_member_at_extend(self, rng: random.Random) -> None:
        """A rank dies as its engine's publisher adds blocks to a transfer, which ends."""

        def kill(transfer: Transfer) -> None:
            engine = transfer.publisher.engine
            fellows = {*transfer.workers} - {transfer.publisher}  # of its generation
            others = [number for number, rank in enumerate(engine.ranks) if rank in fellows]
            if not self.is_over and engine.is_up and (number := self._pick(others)) is not None:
                self._strike("kill-member-at-extend", engine.ranks[number].name, 0.0, *engine.shape.nodes)
                self._world.after(rng.choice((0.0, 0.0001)), engine.replace_rank, number)

        self._world.planned_at_extend.append(kill)

    def _drain(self, rng: random.Random) -> None:
        """A daemon takes nothing new, and ends when nothing is left, or after a while; another is started."""
        if (name := self._pick(self._living_nodes())) is None:
            return
        world, delay_s = self._world, rng.choice((0.01, 0.3, 3.0))
        daemon, within_s = world.daemons[name], DRAIN_S + STOP_S
        self._strike("drain", name, within_s + delay_s, name)
        self._hit(daemon, 0.0)

        def ended() -> None:
            left = [process.name for process in world.processes_of(name) if process.may_run]
            if daemon.is_over and left:
                world.violate(Check.DRAINED, f"{name} has drained, and {left} go on")
            self._restart(name, delay_s)

        def begun() -> None:
            text, parties = f"{name} drains, and does not end", (("daemon", name),)
            world.expectations.expect(Check.DRAINED, text, parties, within_s, lambda: daemon.is_dead)

        daemon.on_death.append(ended)
        Operator(world).post(name, "/v1/drain", begun)

    def _reuse_address(self, rng: random.Random) -> None:
        """A daemon is away, and the daemon of another node answers at its address."""
        away, tenant = self._two_nodes(rng)
        if not self._world.daemons[away].is_dead and not self._world.daemons[tenant].is_dead:
            network = self._world.network
            delay_s = self._kill_daemon_of(rng, "reuse-address", away, (0.05, 0.3, 3.0))
            network.lend_address(self._world.address_of(away), self._world.address_of(tenant))
            self._world.after(delay_s - 0.001, network.give_back_addresses)

    def _kill_daemon_at_read(self, rng: random.Random) -> None:
        """A daemon dies while one of its movers reads, which may outlive it for a while."""
        outlives_s = rng.choice((0.0, 3.0, HELD_S))

        def kill(mover: SimTransport) -> None:
            name = self._node_of(mover)
            mover.stalls_until = mover.hangs_until = self._world.kernel.now + outlives_s
            self._hit(mover.process, outlives_s)
            self._world.expectations.disturb(outlives_s, *self._world.node_names)
            if not self._world.daemons[name].is_dead:
                self._world.kill_daemon(name)
                self._restart(name, rng.choice((0.01, 0.3, 4.0)))

        self._at_read(rng, "kill-daemon-at-read", kill)

    def _lose_daemon_in_doubt(self, rng: random.Random) -> None:
        """A read fails in a way that proves nothing, and its rank loses its daemon, or their connection.

        The next reads may take so long that movers of former connections end meanwhile.
        """
        dies, stalls = rng.random() < 0.6, rng.random() < 0.5

        def stall(mover: SimTransport) -> None:
            mover.stalls_until = self._world.kernel.now + DYING_S[-1]
            self._world.expectations.disturb(DYING_S[-1], *self._world.node_names)

        def lose(worker: Worker) -> None:
            self._world.planned_at[Moment.READ] += [(0.0, stall)] * 3 if stalls else []
            if dies and not self._world.daemons[worker.node].is_dead:
                self._end_daemon(worker.node)
            else:
                self._cut(rng, worker)

        def fail(mover: SimTransport) -> None:
            mover.dies_slowly = True
            if mover.fail_one_read(late_share=1.0):
                self._world.planned_in_doubt.append(lose)

        self._at_read(rng, "lose-daemon-in-doubt", fail)

    def _stop_daemon_at_read(self, rng: random.Random) -> None:
        """A daemon stands still while one of its movers reads, until after deadlines; the mover may, too.

        Meanwhile the daemon may die, or its movers.
        """
        seconds, hangs = rng.choice((1.6, 4.0, 12.0)), rng.random() < 0.6
        ends = rng.choice((None, None, self._end_daemon, self._end_movers))

        def stop(mover: SimTransport) -> None:
            name = self._node_of(mover)
            self._world.expectations.disturb(seconds, *self._world.node_names)
            if hangs:
                mover.stalls_until = mover.hangs_until = self._world.kernel.now + min(seconds, HELD_S)
                self._hit(mover.process, seconds)
            self._hold([self._world.daemons[name]], seconds)
            if ends:
                self._world.after(
                    0.9 * seconds, self._end_daemon if ends == "daemon" else self._end_movers, name
                )

        self._at_read(rng, "stop-daemon-at-read", stop)

    def _end_movers(self, name: str) -> None:
        for mover in self._world.movers_of(name):
            self._world.kernel.kill(mover)

    def _node_of(self, mover: SimTransport) -> str:
        """Return the node of a mover: a process there, or a thread of a worker. A former life has any."""
        nodes = {w.process: w.node for engine in self._world.engines for w in engine.workers}
        name = mover.process.name.split()[0]
        return nodes.get(mover.process) or (
            name if name in self._world.node_names else self._world.node_names[0]
        )

    def _kill_daemon_of(
        self, rng: random.Random, kind: str, name: str | None, delays_s: Sequence[float]
    ) -> float:
        """Kill a node's daemon; return in how long it is back."""
        delay_s = rng.choice(delays_s)
        if name is not None:
            self._strike(kind, name, 0.0, name)
            self._world.kill_daemon(name)
            self._restart(name, delay_s)
        return delay_s

    def _restart(self, name: str, delay_s: float) -> None:
        self._world.expectations.disturb(delay_s, name, ("daemon", name))
        self._world.after(delay_s, self._world.start_daemon, name)

    def _kill_node(self, rng: random.Random) -> None:
        """A node is gone with all that runs there; it comes back."""
        if (name := self._pick(self._living_nodes())) is None:
            return
        self._strike("kill-node", name, 0.0, name)
        engines = [engine for engine in self._world.engines if name in engine.shape.nodes and engine.is_up]
        for engine in engines:
            engine.die()
        self._world.kill_daemon(name)
        delay_s = rng.choice((0.01, 1.0, 4.0, 20.0))
        self._restart(name, delay_s)
        for engine in engines:
            self._world.after(delay_s + rng.choice((0.0, 0.3)), self._revive, engine)

    @staticmethod
    def _revive(engine: Engine) -> None:
        if not engine.is_up:
            engine.start()

    def _stop_daemon(self, rng: random.Random) -> None:
        if (name := self._pick(self._living_nodes())) is not None:
            self._stop(rng, "stop-daemon", self._world.daemons[name], (0.02, 0.3, 2.0, 12.0), name)

    def _stop_node(self, rng: random.Random) -> None:
        """A node stands still with all that runs there, as a virtual machine may."""
        if (name := self._pick(self._living_nodes())) is None:
            return
        lasting_s = rng.choice((0.1, 1.0, 5.0))
        workers = [worker for engine in self._world.engines for worker in engine.workers]
        self._strike("stop-node", f"{name} for {lasting_s} s", lasting_s, *self._world.node_names, *workers)
        self._hold(self._processes_on(name), lasting_s)

    def _slow_node(self, rng: random.Random) -> None:
        """A node's reads take long; meanwhile its daemon stops, or dies while its movers stand still."""
        if (name := self._pick(self._living_nodes())) is None:
            return
        world, daemon = self._world, self._world.daemons[name]
        seconds, begins_s = rng.choice((1.5, 3.0, 12.0)), rng.choice((0.0, 0.05, 1.0, 3.0))
        self._strike("slow-node", name, seconds + begins_s, *world.node_names)
        movers = [t for t in world.fabric.agents.values() if t.process in world.processes_of(name)]
        for transport in movers:
            transport.stalls_until = world.kernel.now + seconds
        stops, only_stops = rng.random() < 0.7, rng.random() < 0.4

        def strike() -> None:
            if daemon.is_dead or daemon.is_stopped:
                return
            if only_stops:
                self._hold([daemon], seconds)
                return
            if stops:  # until reads have landed where a network card moves them
                self._hold([p for p in world.processes_of(name) if p is not daemon], min(seconds, HELD_S))
            world.kill_daemon(name)
            self._restart(name, 0.01)

        world.after(begins_s, strike)

    def _hold(self, processes: Sequence[Process], seconds: float) -> None:
        """Stop processes for so long."""
        for process in processes:
            if not process.is_stopped and not process.is_dead:
                self._world.kernel.stop(process)
                self._world.after(seconds, self._world.kernel.resume, process)

    def _kill_mover(self, rng: random.Random) -> None:
        if (found := self._mover()) is not None:
            name, process = found
            self._strike("kill-mover", process.name, 0.0, name)
            self._world.kernel.kill(process)

    def _stop_mover(self, rng: random.Random) -> None:
        if (found := self._mover()) is not None:
            self._stop(rng, "stop-mover", found[1], (0.02, 0.3, 4.0, 6.0), found[0])

    def _kill_forkserver(self, rng: random.Random) -> None:
        if (found := self._forkserver()) is not None:
            self._strike("kill-forkserver", found[1].name, 0.0, found[0])
            self._world.kernel.kill(found[1])

    def _stop_forkserver(self, rng: random.Random) -> None:
        if (found := self._forkserver()) is not None:
            self._stop(rng, "stop-forkserver", found[1], (0.02, 0.3, 4.0), found[0])

    def _kill_engine(self, rng: random.Random) -> None:
        if (engine := self._pick(self._engines())) is not None:
            self._strike("kill-engine", engine.shape.name, 0.0, *engine.shape.nodes)
            engine.die()
            self._world.after(rng.choice((0.01, 0.3)), self._revive, engine)

    def _stop_worker(self, rng: random.Random) -> None:
        if (worker := self._pick(self._workers())) is not None:
            self._stop(rng, "stop-worker", worker.process, (0.02, 0.3, 2.0), worker)

    def _stop(
        self, rng: random.Random, kind: str, process: Process, seconds: Sequence[float], party: object
    ) -> None:
        if process.is_stopped or process.is_dead:
            return
        lasting_s = rng.choice(seconds)
        self._strike(kind, f"{process.name} for {lasting_s} s", lasting_s, party)
        self._hold([process], lasting_s)

    def _cut_worker(self, rng: random.Random) -> None:
        """A connection between a worker and its daemon breaks in the middle of a frame of either."""
        self._cut(rng, self._pick(self._workers()))

    def _cut_worker_at_read(self, rng: random.Random) -> None:
        """The connection of a worker breaks while its blocks may be written."""

        def cut(mover: SimTransport) -> None:
            self._node = self._node_of(mover)
            if (pull := self._pick(self._pulls())) is not None:
                self._cut(rng, pull.worker)

        self._at_read(rng, "cut-worker-at-read", cut)

    def _cut(self, rng: random.Random, worker: Worker | None) -> None:
        if worker is None:
            return
        process = rng.choice((worker.process, self._world.daemons[worker.node]))

        def strike() -> None:
            self._strike("cut-worker", process.name, 1.0, worker.node, worker)
            self._hit(process, 1.0)
            self._world.unsure_counts.add(worker.node)  # the frame may be the word of a delivery

        process.at_cut = strike

    def _few_bytes(self, rng: random.Random) -> None:
        """A process's sockets take and give a few bytes at a time, for a while."""
        if (worker := self._pick(self._workers())) is not None:
            process = rng.choice((worker.process, self._world.daemons[worker.node]))
            self._strike("few-bytes", process.name, 2.0, worker.node, worker)
            self._hit(process, 2.0)
            self._world.unsure_counts.add(worker.node)  # a mover may die in the middle of its word
            process.io_bytes = rng.choice((7, 30))
            self._world.after(0.5, setattr, process, "io_bytes", self._world.traits.io_bytes)

    def _no_descriptors(self, rng: random.Random) -> None:
        """A daemon or a worker has few descriptors left, or none."""
        if (worker := self._pick(self._workers())) is None:
            return
        process = rng.choice((worker.process, self._world.daemons[worker.node]))
        if process.is_dead or not self._world.movers_of(worker.node):
            return  # a daemon that cannot start is for whoever started it
        lasting_s = rng.choice((0.02, 0.3, 2.0))
        self._strike("no-descriptors", process.name, lasting_s + 1.0, *self._world.node_names, worker)
        self._hit(process, lasting_s + 1.0)
        self._world.kernel.take_fds(process, rng.choice((0, 0, 1, 2)))
        self._world.after(lasting_s, setattr, process, "max_fd", MAX_FD)

    def _no_threads(self, rng: random.Random) -> None:
        """A daemon or a mover cannot start a thread, for a while; the daemon may be starting."""
        if (found := rng.choice((self._daemon, self._mover))()) is None:
            return
        process = found[1]
        lasting_s = rng.choice((0.02, 0.3, 2.0))
        self._strike("no-threads", process.name, lasting_s + 1.0, *self._world.node_names)
        self._hit(process, lasting_s + 1.0)
        if process is self._world.daemons[found[0]] and rng.random() < 0.3:
            self._world.kill_daemon(found[0])
            self._world.start_daemon(found[0])
            process = self._world.daemons[found[0]]
        process.can_start_threads = False
        self._world.after(lasting_s, setattr, process, "can_start_threads", True)

    def _no_processes(self, rng: random.Random) -> None:
        """No mover can be forked for a while, in which one may die that has a rank."""
        if (found := self._forkserver()) is None:
            return
        name, process = found
        lasting_s = rng.choice((0.02, 0.3, 2.0))
        self._strike("no-processes", process.name, lasting_s + FORKED_AGAIN_S, name)
        self._hit(process, lasting_s + FORKED_AGAIN_S)
        process.can_fork = False
        self._world.after(lasting_s, setattr, process, "can_fork", True)
        if (mover := self._pick(self._world.movers_of(name))) is not None and rng.random() < 0.7:
            self._world.kernel.kill(mover)

    def _full_disk(self, rng: random.Random) -> None:
        """A daemon cannot write who owns its engines, for a while, or until it ends."""
        if (name := self._pick(self._living_nodes())) is not None:
            self._strike("full-disk", name, 0.0, name)
            self._world.daemons[name].is_disk_full = True
            self._world.after(
                rng.choice((0.5, 5.0)), setattr, self._world.daemons[name], "is_disk_full", False
            )

    def _torn_owners(self, rng: random.Random) -> None:
        """A daemon finds half of what it wrote of its engines' owners, nothing, or nonsense."""
        if (name := self._pick(self._living_nodes())) is None:
            return
        self._strike("torn-owners", name, 0.0, name)
        self._world.kill_daemon(name)
        path = self._world.directory / name / "private" / "owners.json"
        if path.exists():
            content = path.read_bytes()
            path.write_bytes(rng.choice((content[: len(content) // 2], b"", b"nonsense")))
        self._restart(name, rng.choice((0.01, 0.1)))

    def _replace_rank(self, rng: random.Random) -> None:
        """A rank's process dies, and another takes its place: not the publisher's."""
        if (engine := self._pick(self._engines())) is None:
            return
        ranks = [number for number, worker in enumerate(engine.ranks) if worker is not engine.publisher]
        if (number := self._pick(ranks)) is not None:
            self._strike("replace-rank", engine.ranks[number].name, 0.0, *engine.shape.nodes)
            engine.replace_rank(number)

    def _scale(self, rng: random.Random) -> None:
        """Another generation of an engine takes over, while the one before runs."""
        if (engine := self._pick(self._engines())) is not None:
            overlap_s = rng.choice((0.0, 0.02, 0.3, 2.0))
            self._strike("scale", engine.shape.name, overlap_s, *engine.shape.nodes)
            engine.scale(overlap_s)

    def _slow_process(self, rng: random.Random) -> None:
        """A process waits long for a processor, for a while."""
        living = [p for p in self._world.kernel.processes.values() if not p.is_dead]
        if (process := self._pick(living)) is not None:
            lasting_s = rng.choice((0.1, 1.0))
            self._strike("slow-process", process.name, lasting_s + 1.0, *self._world.node_names)
            process.slowness = rng.choice((10.0, 100.0))
            self._world.reasons.process_struck(process, lasting_s + 1.0)
            self._world.after(lasting_s, setattr, process, "slowness", 1.0)

    # --- requests

    def _cancel(self, rng: random.Random) -> None:
        if (pull := self._pick(self._pulls())) is not None:
            self._strike("cancel", f"{pull.worker.name}", 0.0, pull.worker)
            pull.worker.do(lambda: pull.worker.cancel(pull))

    def _abandon(self, rng: random.Random) -> None:
        if (pull := self._pick(self._pulls())) is not None:
            self._strike("abandon", pull.worker.name, 0.0, pull.worker)
            pull.worker.do(lambda: pull.worker.abandon(pull.transfer))

    def _lose_reader(self, rng: random.Random) -> None:
        """An engine that reads a transfer with others abandons it, or dies."""
        shared = [pull for pull in self._pulls() if pull.transfer.num_readers > 1]
        if (pull := self._pick(shared)) is None:
            return
        engine = pull.worker.engine
        self._strike("lose-reader", engine.shape.name, 0.0, *engine.shape.nodes)
        if rng.random() < 0.5:
            pull.worker.do(lambda: pull.worker.abandon(pull.transfer))
        else:
            engine.die()
            self._world.after(rng.choice((0.01, 0.3)), self._revive, engine)

    def _send_elsewhere(self, rng: random.Random) -> None:
        """A router sends a request to another engine too, or instead: by the same reference."""
        sinks = [engine for engine in self._world.sinks if engine.is_ready]
        pulls = [pull for pull in self._pulls() if any(pull.worker.engine is not sink for sink in sinks)]
        if (pull := self._pick(pulls)) is None:
            return
        engine, is_instead = pull.worker.engine, rng.random() < 0.5
        other = rng.choice([sink for sink in sinks if sink is not engine])
        self._strike("send-elsewhere", f"{engine.shape.name} {other.shape.name}", 0.0, pull.worker)
        if is_instead and rng.random() < 0.5:
            engine.die()
            self._world.after(rng.choice((0.01, 0.3)), self._revive, engine)
        elif is_instead:
            pull.worker.do(lambda: pull.worker.cancel(pull))
        self._world.after(rng.choice((0.0, 0.01, 0.3)), other.pull, pull.transfer)

    def _unpublish(self, rng: random.Random) -> None:
        live = [t for e in self._world.sources if e.is_ready for t in e.transfers.values()]
        if (transfer := self._pick(live)) is not None:
            self._strike("unpublish", f"{transfer.transfer_id} of {transfer.publisher.name}", 0.0)
            transfer.publisher.do(lambda: transfer.publisher.unpublish(transfer))

    def _operator_cancels_transfer(self, rng: random.Random) -> None:
        live = [
            t for e in self._world.sources if e.is_ready for t in e.transfers.values() if t.ref is not None
        ]
        if (transfer := self._pick(live)) is None:
            return
        name = transfer.publisher.engine.shape.name
        self._strike("operator-cancels-transfer", f"{transfer.transfer_id} of {name}", 0.0)
        cancel_transfer(self._world, transfer)

    def _operator_cancels_pull(self, rng: random.Random) -> None:
        def cancelled(pull: Pull) -> None:
            self._world.expectations.disturb(0.0, pull.worker)
            pull.is_cancelled = True

        if (name := self._pick(self._living_nodes())) is not None and self._pulls():
            self._strike("operator-cancels-pull", name, 0.0)
            Operator(self._world).cancel_a_pull(name, rng.getrandbits(32), cancelled)

    def _drop_peer(self, rng: random.Random) -> None:
        """An operator has a daemon forget a peer, with the requests to it."""
        if self._world.daemons[self._node].is_dead:
            return
        one, other = self._two_nodes(rng)
        self._strike("drop-peer", f"{other} at {one}", 0.0, one, other)
        self._world.reasons.link_struck(self._world.host_of(one), self._world.host_of(other), 0.0)
        Operator(self._world).post(one, f"/v1/peers/drop?endpoint={self._world.endpoint_of(other)}")

    def _disown(self, rng: random.Random) -> None:
        """An operator gives an engine's name to whoever registers next; its processes may just be gone.

        One that has ranks on other nodes could not be started again while these are known.
        """
        of_one_node = [engine for engine in self._engines() if len(set(engine.shape.nodes)) == 1]
        if (engine := self._pick(of_one_node)) is None:
            return
        name = engine.shape.name
        self._strike("disown", name, 0.0, *engine.shape.nodes)
        if rng.random() < 0.7:
            engine.die()
            self._world.after(rng.choice((0.01, 0.3)), self._revive, engine)
        Operator(self._world).post(engine.shape.nodes[0], f"/v1/engines/disown?engine_id={name}")

    def _republish(self, rng: random.Random) -> None:
        """A publisher uses an id for other blocks, while its transfer lives or when it is over."""
        ready = [engine for engine in self._world.sources if engine.is_ready]
        used = [t for e in ready for t in e.by_id.values() if t.ref is not None and t.refused is None]
        if (transfer := self._pick(used)) is not None and transfer.publisher.is_ready:
            self._strike("republish", f"{transfer.transfer_id} of {transfer.publisher.name}", 0.0)
            transfer.publisher.do(lambda: transfer.publisher.republish(transfer))

    def _sleep(self, rng: random.Random) -> None:
        if (worker := self._pick(self._awake())) is not None:
            self._strike("sleep", worker.name, 0.0, worker)
            worker.do(worker.suspend)

    def _sleep_without_daemon(self, rng: random.Random) -> None:
        """A rank sleeps and wakes while its daemon is away, or as it comes back."""
        if (worker := self._pick(self._awake())) is None or self._world.daemons[worker.node].is_dead:
            return
        delay_s = self._kill_daemon_of(rng, "sleep-without-daemon", worker.node, (0.01, 0.1, 0.6))
        self._world.expectations.disturb(delay_s, worker)
        when_s = rng.choice((0.0, 0.002, delay_s + 0.0005, delay_s + 0.01, rng.uniform(0.0, 0.8)))
        self._world.after(when_s, worker.do, worker.suspend)

    def _sleep_before_mover(self, rng: random.Random) -> None:
        """A rank sleeps while another mover is made for it, which may take long."""
        if (worker := self._pick(self._awake())) is None:
            return
        name = self._node = worker.node
        hold_s = rng.choice((0.02, 0.3, REBIND_AFTER_S + 0.3))
        self._strike("sleep-before-mover", worker.name, hold_s, name, worker)
        if (found := self._forkserver()) is not None:
            self._hold([found[1]], hold_s)
        for mover in self._world.movers_of(name):
            self._world.kernel.kill(mover)
        when_s = rng.choice((0.0005, 0.05, REBIND_AFTER_S + 0.01, REBIND_AFTER_S + 0.1))
        self._world.after(when_s, worker.do, worker.suspend)

    def _sleep_at_registering(self, rng: random.Random) -> None:
        """A rank sleeps as it registers with a restarted daemon."""
        if (worker := self._pick(self._awake())) is None or self._world.daemons[worker.node].is_dead:
            return
        self._kill_daemon_of(rng, "sleep-at-registering", worker.node, (0.01, 0.1))
        self._world.expectations.disturb(1.0, worker)
        delay_s = rng.choice((0.0, 0.0002, 0.001, 0.004))
        sleep = partial(self._world.after, delay_s, worker.do, worker.suspend)
        self._world.kernel.at_connect[worker.process] = sleep

    def _sleep_engine(self, rng: random.Random) -> None:
        """All ranks of an engine sleep at once."""
        if (engine := self._pick(self._engines())) is not None and engine.is_ready:
            self._strike("sleep-engine", engine.shape.name, 0.0, *engine.ranks)
            for worker in engine.ranks:
                self._world.after(rng.choice((0.0, 0.0001)), worker.do, worker.suspend)

    # --- reads

    def _at_read(
        self,
        rng: random.Random,
        kind: str,
        act: Callable[[SimTransport], None],
        moment: Moment = Moment.READ,
    ) -> None:
        """Have it happen to the next mover that posts a read, while that may be under way; or at a moment."""

        whom = self._node, self._victim

        def strike(transport: SimTransport) -> None:
            if not self.is_over and not transport.process.is_dead:
                self._node, self._victim = whom
                self._strike(kind, transport.process.name, 0.0, *self._world.node_names)
                act(transport)

        self._world.planned_at[moment].append((rng.choice((0.0, 0.00005, 0.0002, 0.002)), strike))

    def _lose_connection(self, rng: random.Random) -> None:
        def lose(transport: SimTransport) -> None:
            if agents := transport.agents_read_from:
                transport.lose_connection(rng.choice(agents))
                transport.num_to_refuse = rng.choice((0, 0, 1, 2))

        self._at_read(rng, "lose-connection", lose)

    def _fail_read(self, rng: random.Random) -> None:
        self._at_read(rng, "fail-read", lambda transport: transport.fail_one_read() and None)

    def _stall_reads(self, rng: random.Random) -> None:
        """The reads of one mover take long, those too that it posts meanwhile."""
        seconds = rng.choice((0.5, 3.0, 12.0))

        def stall(transport: SimTransport) -> None:
            transport.stalls_until = self._world.kernel.now + seconds
            self._world.expectations.disturb(seconds, *self._world.node_names)

        self._at_read(rng, "stall-reads", stall)

    def _hang_mover(self, rng: random.Random) -> None:
        """A mover does not return from its library, for a while."""
        seconds = rng.choice((0.3, 3.0, 12.0))

        def hang(transport: SimTransport) -> None:
            transport.hangs_until = self._world.kernel.now + seconds
            self._hit(transport.process, seconds)
            self._world.expectations.disturb(seconds, *self._world.node_names)

        self._at_read(rng, "hang-mover", hang)

    def _cancel_at_read(self, rng: random.Random) -> None:
        self._at_read(rng, "cancel-at-read", self._cancel_of)

    def _cancel_at_delivery(self, rng: random.Random) -> None:
        """A request is cancelled when its read is done, and nobody but its mover knows."""
        self._at_read(rng, "cancel-at-delivery", self._cancel_of, Moment.READ_DONE)

    def _cancel_of(self, mover: SimTransport) -> None:
        """Cancel a request of the node whose mover that is."""
        self._node = self._node_of(mover)
        if (pull := self._pick(self._pulls())) is not None:
            self._world.expectations.disturb(0.0, pull.worker)
            pull.worker.do(lambda: pull.worker.cancel(pull))

    def _slow_cancel(self, rng: random.Random) -> None:
        """A request is cancelled whose read takes long, or fails meanwhile in a way that proves nothing."""
        stall_s, cancel_s = rng.choice((0.5, 3.0, 12.0)), rng.choice((0.0, 0.0, 0.1, 1.0))
        fail_s = rng.choice((0.001, 0.01, 0.3, 1.0)) if rng.random() < 0.6 else None

        def slow(mover: SimTransport) -> None:
            mover.stalls_until = self._world.kernel.now + stall_s
            self._world.expectations.disturb(stall_s, *self._world.node_names)
            self._world.after(cancel_s, self._cancel_of, mover)
            if fail_s is not None:
                self._world.after(fail_s, mover.fail_one_read)

        self._at_read(rng, "slow-cancel", slow)

    def _take_back_at_read(self, rng: random.Random, kind: str, act: Callable[[Transfer], None]) -> None:
        """What is read is taken back, between two pieces of a read."""

        def take_back(_: SimTransport) -> None:
            read = [pull.transfer for pull in self._world.open_pulls if not pull.transfer.is_over]
            if (transfer := self._pick(read)) is not None:
                act(transfer)

        self._at_read(rng, kind, take_back)

    def _unpublish_at_read(self, rng: random.Random) -> None:
        def unpublish(transfer: Transfer) -> None:
            transfer.publisher.do(lambda: transfer.publisher.unpublish(transfer))

        self._take_back_at_read(rng, "unpublish-at-read", unpublish)

    def _sleep_at_read(self, rng: random.Random) -> None:
        def sleep(transfer: Transfer) -> None:
            worker = rng.choice(transfer.workers)
            worker.do(worker.suspend)

        self._take_back_at_read(rng, "sleep-at-read", sleep)

    def _kill_source_at_read(self, rng: random.Random) -> None:
        def kill(transfer: Transfer) -> None:
            engine = transfer.publisher.engine
            if engine.is_up:
                self._world.expectations.disturb(0.0, *engine.shape.nodes)
                engine.die()
                self._world.after(rng.choice((0.01, 0.3)), self._revive, engine)

        self._take_back_at_read(rng, "kill-source-at-read", kill)

    def _refuse_reads(self, rng: random.Random) -> None:
        self._at_read(rng, "refuse-reads", lambda transport: setattr(transport, "num_to_refuse", 2))

    def _kill_mover_at_read(self, rng: random.Random) -> None:
        """A mover is killed while it reads."""
        self._at_read(rng, "kill-mover-at-read", lambda mover: self._kill_with_engine(rng, mover))

    def _kill_mover_at_delivery(self, rng: random.Random) -> None:
        """A mover is killed when it has read: maybe its worker has been told, and its daemon not."""
        kill = partial(self._kill_with_engine, rng)
        self._at_read(rng, "kill-mover-at-delivery", kill, Moment.READ_DONE)

    def _deadly_pull(self, rng: random.Random) -> None:
        """Mover after mover dies as it reads."""
        for _ in range(rng.choice((3, 5))):
            self._at_read(rng, "deadly-pull", lambda mover: self._kill_with_engine(rng, mover))

    def _kill_with_engine(self, rng: random.Random, mover: SimTransport) -> None:
        """Kill a mover; where it is a thread of a rank, the rank's engine."""
        for engine in self._world.engines:
            if mover.process in [worker.process for worker in engine.ranks]:
                engine.die()
                self._world.after(rng.choice((0.01, 0.3)), self._revive, engine)
        self._world.kernel.kill(mover.process)

    def _at_binding(self, rng: random.Random, kind: str, act: Callable[[SimTransport], None]) -> None:
        """Kill a mover, and have something happen when another has its rank's memory."""
        if (found := self._mover()) is not None:
            self._world.expectations.disturb(0.0, found[0])
            self._world.kernel.kill(found[1])
            self._at_read(rng, kind, act, Moment.BINDING)

    def _refuse_binding(self, rng: random.Random) -> None:
        """A mover dies, and the next ones cannot register the memory of a rank."""
        if (found := self._mover()) is not None:
            self._strike("refuse-binding", found[1].name, FORKED_AGAIN_S, *self._world.node_names)
            self._world.kernel.kill(found[1])
            self._world.fabric.num_bindings_to_refuse = rng.choice((1, 2, 4))

    def _sleep_at_binding(self, rng: random.Random) -> None:
        """A rank sleeps when it has another mover, and its daemon may die a moment later."""

        def sleep(mover: SimTransport) -> None:
            self._node = mover.process.name.split()[0]
            if (worker := self._pick(self._awake())) is not None:
                worker.do(worker.suspend)
                if rng.random() < 0.5:
                    self._world.after(rng.choice((0.0001, 0.0005, 0.002)), self._end_daemon, worker.node)

        self._at_binding(rng, "sleep-at-binding", sleep)

    def _end_daemon(self, name: str) -> None:
        self._world.kill_daemon(name)
        self._restart(name, 0.01)

    def _kill_mover_at_binding(self, rng: random.Random) -> None:
        """A mover dies as it has its rank's memory; the rank may hear late of the next."""

        def kill(mover: SimTransport) -> None:
            self._node = mover.process.name.split()[0]
            if rng.random() < 0.5 and (worker := self._pick(self._workers())) is not None:
                self._world.expectations.disturb(0.6, worker)
                self._hold([worker.process], rng.choice((0.1, 0.6)))
            self._kill_with_engine(rng, mover)

        self._at_binding(rng, "kill-mover-at-binding", kill)

    # --- whom: of the victim's node, where there is any

    def _two_nodes(self, rng: random.Random) -> tuple[str, str]:
        return self._node, rng.choice([name for name in self._world.node_names if name != self._node])

    def _living_nodes(self) -> list[str]:
        living = [name for name in self._world.node_names if not self._world.daemons[name].is_dead]
        return [self._node] if self._node in living else living

    def _daemon(self) -> tuple[str, Process] | None:
        return self._pick([(name, self._world.daemons[name]) for name in self._living_nodes()])

    def _mover(self) -> tuple[str, Process] | None:
        movers = [(name, process) for name in self._living_nodes() for process in self._world.movers_of(name)]
        return self._pick(movers)

    def _forkserver(self) -> tuple[str, Process] | None:
        found = [
            (name, process)
            for name in self._living_nodes()
            for process in self._world.processes_of(name)
            if process.name.endswith(" forkserver")
        ]
        return self._pick(found)

    def _processes_on(self, name: str) -> list[Process]:
        workers = [w.process for e in self._world.engines for w in e.workers if w.node == name]
        return [*self._world.processes_of(name), *workers]

    def _engines(self) -> list[Engine]:
        up = [engine for engine in self._world.engines if engine.is_up]
        return [engine for engine in up if self._node in engine.shape.nodes] or up

    def _workers(self) -> list[Worker]:
        living = [w for e in self._world.engines for w in e.workers if w.is_alive]
        return [worker for worker in living if worker.node == self._node] or living

    def _awake(self) -> list[Worker]:
        return [worker for worker in self._workers() if worker.is_ready and worker.store is not None]

    def _pulls(self) -> list[Pull]:
        pulls = [pull for pull in self._world.open_pulls if pull.worker.is_ready]
        return [pull for pull in pulls if pull.worker.node == self._node] or pulls

    def _pick(self, among: Sequence[T]) -> T | None:
        return among[self._victim % len(among)] if among else None
