"""Faults: what goes wrong, and to whom. Each is drawn before the episode and strikes at a pull."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from tests.simulation.engine import Worker
from tests.simulation.fabric import SimTransport
from tests.simulation.kernel import Process

if TYPE_CHECKING:
    from tests.simulation.world import World

T = TypeVar("T")

BURST_SHARE = 0.3  # of the faults are followed by others on the same victim
BURST_S = 2.0


class Fault(msgspec.Struct, frozen=True):
    """Strikes so long after the pull of that number has started. `seed` decides on whom and how."""

    pull: int
    delay_s: float
    kind: str
    seed: int


KINDS = {
    "lose-message": 8, "delay-message": 8, "cut-peer": 3, "sever": 2,
    "kill-daemon": 2, "stop-daemon": 3, "kill-mover": 3, "stop-mover": 3, "kill-forkserver": 1,
    "stop-forkserver": 1, "kill-engine": 1, "stop-worker": 2, "slow-process": 2,
    "cancel": 4, "abandon": 2, "unpublish": 4, "sleep": 3,
    "lose-connection": 3, "fail-read": 3, "stall-reads": 2, "refuse-reads": 1,
    "kill-mover-at-read": 2, "kill-node": 1,
}  # fmt: skip


def draw_faults(rng: random.Random, number: int) -> list[Fault]:
    """Draw which kinds an episode has, how often, and when each strikes."""
    share = rng.choice((0.3, 0.6, 1.0))
    kinds = {kind: weight * rng.random() for kind, weight in KINDS.items() if rng.random() < share} or KINDS
    spread = rng.choice((0.5, 1.0, 2.0))  # pulls a fault
    faults = []
    for _ in range(number):
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        pull = 1 + int(rng.random() * number * spread)
        delay = rng.choice((0.0, 0.0005, 0.002, 0.01)) * rng.random()
        faults.append(Fault(pull, delay, kind, rng.getrandbits(32)))
    return sorted(faults, key=lambda fault: (fault.pull, fault.delay_s))


class Faults:
    """Makes faults happen, on the host's thread. `struck(kind)` is called when one does."""

    def __init__(self, world: World, struck: Callable[[str], None]) -> None:
        self._world = world
        self._struck = struck
        self.is_over = False

    def plan(self, fault: Fault) -> None:
        """Have a fault strike now."""
        if not self.is_over:
            getattr(self, "_" + fault.kind.replace("-", "_"))(random.Random(fault.seed))

    def heal(self) -> None:
        """Undo what would last."""
        world = self._world
        world.planned_at_read.clear()
        world.planned_messages.clear()
        for process in world.kernel.processes.values():
            process.slowness = 1.0
            if process.is_stopped:
                world.kernel.resume(process)
        for name in world.node_names:
            world.start_daemon(name)

    def _strike(self, kind: str, whom: str, lasting_s: float, *parties: object) -> None:
        self._world.tell("fault", f"{kind} {whom}")
        self._world.expectations.disturb(lasting_s, *parties)
        self._struck(kind)

    # --- messages between nodes

    def _message(self, rng: random.Random, kind: str, delay_s: float | None) -> None:
        one, other = rng.sample(self._world.node_names, 2)
        hosts = frozenset((self._world.host_of(one), self._world.host_of(other)))

        def strike() -> None:
            self._strike(kind, f"{one} {other}", delay_s or 0.0, one, other)

        self._world.planned_messages.append((hosts if rng.random() < 0.3 else None, delay_s, strike))

    def _lose_message(self, rng: random.Random) -> None:
        self._message(rng, "lose-message", None)

    def _delay_message(self, rng: random.Random) -> None:
        self._message(rng, "delay-message", rng.choice((0.003, 0.05, 0.5, 3.0)))

    def _cut_peer(self, rng: random.Random) -> None:
        if (wire := self._pick(rng, self._world.network.wires)) is not None:
            self._strike("cut-peer", f"{wire.dealer.host} {wire.router.host}", 0.0, *self._world.node_names)
            self._world.network.cut(wire)

    def _sever(self, rng: random.Random) -> None:
        one, other = rng.sample(self._world.node_names, 2)
        seconds = rng.choice((0.05, 0.5, 3.0, 12.0))
        self._strike("sever", f"{one} {other} for {seconds} s", seconds, one, other)
        self._world.network.sever(self._world.host_of(one), self._world.host_of(other), seconds)

    # --- processes

    def _kill_daemon(self, rng: random.Random) -> None:
        if (name := self._pick(rng, self._living_nodes())) is not None:
            self._strike("kill-daemon", name, 0.0, name)
            self._world.kill_daemon(name)
            self._restart(name, rng.choice((0.01, 0.1, 1.0)))

    def _restart(self, name: str, delay_s: float) -> None:
        self._world.expectations.disturb(delay_s, name)
        self._world.after(delay_s, self._world.start_daemon, name)

    def _kill_node(self, rng: random.Random) -> None:
        """A node is gone with all that runs there; it comes back."""
        if (name := self._pick(rng, self._living_nodes())) is None:
            return
        self._strike("kill-node", name, 0.0, name)
        engines = [engine for engine in self._world.engines if name in engine.shape.nodes and engine.is_up]
        for engine in engines:
            engine.die()
        self._world.kill_daemon(name)
        delay_s = rng.choice((0.01, 1.0, 4.0))
        self._restart(name, delay_s)
        for engine in engines:
            self._world.after(delay_s + rng.choice((0.0, 0.3)), self._revive, engine)

    def _revive(self, engine: object) -> None:
        if not engine.is_up:  # type: ignore[attr-defined]
            engine.start()  # type: ignore[attr-defined]

    def _stop_daemon(self, rng: random.Random) -> None:
        if (name := self._pick(rng, self._living_nodes())) is not None:
            self._stop(rng, "stop-daemon", self._world.daemons[name], (0.02, 0.3, 2.0, 12.0), name)

    def _kill_mover(self, rng: random.Random) -> None:
        if (found := self._mover(rng)) is not None:
            name, process = found
            self._strike("kill-mover", process.name, 0.0, name)
            self._world.kernel.kill(process)

    def _stop_mover(self, rng: random.Random) -> None:
        if (found := self._mover(rng)) is not None:
            self._stop(rng, "stop-mover", found[1], (0.02, 0.3, 4.0, 6.0), found[0])

    def _kill_forkserver(self, rng: random.Random) -> None:
        if (found := self._forkserver(rng)) is not None:
            self._strike("kill-forkserver", found[1].name, 0.0, found[0])
            self._world.kernel.kill(found[1])

    def _stop_forkserver(self, rng: random.Random) -> None:
        if (found := self._forkserver(rng)) is not None:
            self._stop(rng, "stop-forkserver", found[1], (0.02, 0.3, 4.0), found[0])

    def _kill_engine(self, rng: random.Random) -> None:
        engine = self._pick(rng, [engine for engine in self._world.engines if engine.is_up])
        if engine is not None:
            self._strike("kill-engine", engine.shape.name, 0.0, *engine.shape.nodes)
            engine.die()
            self._world.after(rng.choice((0.01, 0.3)), self._revive, engine)

    def _stop_worker(self, rng: random.Random) -> None:
        if (worker := self._worker(rng)) is not None:
            self._stop(rng, "stop-worker", worker.process, (0.02, 0.3, 2.0), worker)

    def _stop(
        self, rng: random.Random, kind: str, process: Process, seconds: Sequence[float], party: object
    ) -> None:
        if process.is_stopped or process.is_dead:
            return
        lasting_s = rng.choice(seconds)
        self._strike(kind, f"{process.name} for {lasting_s} s", lasting_s, party)
        self._world.kernel.stop(process)
        self._world.after(lasting_s, self._world.kernel.resume, process)

    def _slow_process(self, rng: random.Random) -> None:
        """A process waits long for a processor, for a while."""
        living = [p for p in self._world.kernel.processes.values() if not p.is_dead]
        if (process := self._pick(rng, living)) is not None:
            lasting_s = rng.choice((0.1, 1.0))
            self._strike("slow-process", process.name, lasting_s + 1.0, *self._world.node_names)
            process.slowness = rng.choice((10.0, 100.0))
            self._world.reasons.process_struck(process, lasting_s + 1.0)
            self._world.after(lasting_s, setattr, process, "slowness", 1.0)

    # --- requests

    def _cancel(self, rng: random.Random) -> None:
        if (pull := self._pick(rng, list(self._world.open_pulls))) is not None and pull.worker.is_ready:
            self._strike("cancel", f"{pull.worker.name}", 0.0, pull.worker)
            pull.worker.do(lambda: pull.worker.cancel(pull))

    def _abandon(self, rng: random.Random) -> None:
        if (pull := self._pick(rng, list(self._world.open_pulls))) is not None and pull.worker.is_ready:
            self._strike("abandon", pull.worker.name, 0.0, pull.worker)
            pull.worker.do(lambda: pull.worker.abandon(pull.transfer))

    def _unpublish(self, rng: random.Random) -> None:
        live = [t for e in self._world.sources if e.is_ready for t in e.transfers.values()]
        if (transfer := self._pick(rng, live)) is not None:
            self._strike("unpublish", f"{transfer.transfer_id} of {transfer.publisher.name}", 0.0)
            transfer.publisher.do(lambda: transfer.publisher.unpublish(transfer))

    def _sleep(self, rng: random.Random) -> None:
        ranks = [w for e in self._world.engines for w in e.ranks if w.is_ready]
        if (worker := self._pick(rng, ranks)) is not None:
            self._strike("sleep", worker.name, 0.0, worker)
            worker.do(worker.suspend)

    # --- reads

    def _at_read(self, rng: random.Random, kind: str, act: Callable[[SimTransport], None]) -> None:
        """Have it happen to the next mover that posts a read, while that may be under way."""

        def strike(transport: SimTransport) -> None:
            if not self.is_over and not transport.process.is_dead:
                self._strike(kind, transport.process.name, 0.0, *self._world.node_names)
                act(transport)

        self._world.planned_at_read.append((rng.choice((0.0, 0.00005, 0.0002, 0.002)), strike))

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

    def _refuse_reads(self, rng: random.Random) -> None:
        self._at_read(rng, "refuse-reads", lambda transport: setattr(transport, "num_to_refuse", 2))

    def _kill_mover_at_read(self, rng: random.Random) -> None:
        """A mover is killed while it reads; where it is a thread of a rank, the rank's engine."""

        def kill(transport: SimTransport) -> None:
            engines = [e for e in self._world.engines if transport.process in [w.process for w in e.ranks]]
            for engine in engines:
                engine.die()
                self._world.after(rng.choice((0.01, 0.3)), self._revive, engine)
            self._world.kernel.kill(transport.process)

        self._at_read(rng, "kill-mover-at-read", kill)

    # --- whom

    def _living_nodes(self) -> list[str]:
        return [name for name in self._world.node_names if not self._world.daemons[name].is_dead]

    def _mover(self, rng: random.Random) -> tuple[str, Process] | None:
        movers = [(name, process) for name in self._living_nodes() for process in self._world.movers_of(name)]
        return self._pick(rng, movers)

    def _forkserver(self, rng: random.Random) -> tuple[str, Process] | None:
        found = [
            (name, process)
            for name in self._living_nodes()
            for process in self._world.processes_of(name)
            if process.name.endswith(" forkserver")
        ]
        return self._pick(rng, found)

    def _worker(self, rng: random.Random) -> Worker | None:
        return self._pick(rng, [w for e in self._world.engines for w in e.workers if w.is_alive])

    @staticmethod
    def _pick(rng: random.Random, among: Sequence[T]) -> T | None:
        return rng.choice(among) if among else None
