"""The shell of the pool of movers, with the real decisions and simulated processes.

Promises, beside those of `processes`:

* A mover's messages are fed in the order in which it sent them, all before its exit.
* The forkserver answers each fork in order, and its exit is fed after its last reply.
* A ready mover that is dead is not assigned, and what the decisions want is carried out in order.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import assert_never

from kvxferd.errors import MoverError
from kvxferd.ids import AgentName, MoverId
from kvxferd.mover.forkserver_protocol import Forked, LibraryLoaded
from kvxferd.mover.supervisor import pool_effects as fx
from kvxferd.mover.supervisor import pool_events as ev
from kvxferd.mover.supervisor.pool_decisions import PoolDecisions
from kvxferd.wire.mover import FromMover, MoverUp
from tests.property.simulation.agenda import Actor, Agenda, Pipe
from tests.property.simulation.shells.processes import SimulatedProcess

LATENCIES_S = (0.00005, 0.0001, 0.0002, 0.001)
IMPORT_S = 0.5
AGENT_S = (0.02, 0.5)


class SimulatedHandle:
    """The daemon's end of one mover."""

    def __init__(
        self, mover_id: MoverId, agent: AgentName, process: SimulatedProcess, to_daemon: Pipe
    ) -> None:
        self.mover_id = mover_id
        self.agent = agent
        self.process = process
        self.to_daemon = to_daemon
        self.has_exited = False  # its exit was fed


class SimulatedPool:
    """One daemon's pool. `owner` is the daemon's process: nothing is fed while it is stopped."""

    def __init__(
        self,
        owner: Actor,
        rng: random.Random,
        *,
        size: int,
        mover_ids: Iterator[int],
        on_exit: Callable[[MoverId], None],
        on_message: Callable[[MoverId, FromMover], None] = lambda mover, message: None,
    ) -> None:
        self.decisions = PoolDecisions(size=size, mover_ids=mover_ids, new_agent=self._new_agent)
        self.forkserver: SimulatedProcess | None = None
        self.handles: dict[MoverId, SimulatedHandle] = {}
        self.is_stopped = False
        self._owner = owner
        self._agenda: Agenda = owner.agenda
        self._rng = rng
        self._names = itertools.count(1)
        self._pids = itertools.count(1000)
        self._on_exit = on_exit
        self._on_message = on_message
        self._on_result: dict[int, Callable[[SimulatedHandle | MoverError], None]] = {}
        self._requests = itertools.count(1)
        self._events: deque[ev.PoolEvent] = deque()
        self._is_feeding = False
        self._tick_at: float | None = None
        self._from_forkserver: Pipe
        self._to_forkserver: Pipe

    def start(self) -> None:
        self.feed(ev.Started())

    def stop(self) -> None:
        """Begin to stop; `is_stopped` once nothing is left."""
        self.feed(ev.StopRequested())

    def request(self, on_result: Callable[[SimulatedHandle | MoverError], None]) -> None:
        """Call `on_result` once."""
        for mover in self.decisions.warm():
            if not self.handles[mover].process.is_alive:
                self._report_exit(self.handles[mover])
        number = next(self._requests)
        self._on_result[number] = on_result
        self.feed(ev.MoverRequested(number))

    def feed(self, event: ev.PoolEvent) -> None:
        """Feed one event at a time, and carry out its effects before the next."""
        self._events.append(event)
        if self._is_feeding:
            return
        self._is_feeding = True
        while self._events:
            for effect in self.decisions.feed(self._events.popleft(), self._agenda.now):
                self._carry_out(effect)
            self.decisions.check_integrity()
        self._is_feeding = False
        deadline = self.decisions.next_deadline()
        if deadline is not None and (self._tick_at is None or deadline < self._tick_at):
            self._tick_at = deadline
            self._owner.at(deadline, self._tick, deadline)

    def _tick(self, due: float) -> None:
        if due == self._tick_at:
            self._tick_at = None
            self.feed(ev.TimersDue())

    def _new_agent(self) -> AgentName:
        return AgentName(f"{self._owner.name}/mover{next(self._names)}")

    def _latency_s(self) -> float:
        return self._rng.choice(LATENCIES_S)

    # --- effects

    def _carry_out(self, effect: fx.PoolEffect) -> None:
        match effect:
            case fx.StartForkserver():
                self._start_forkserver()
            case fx.ShutDownForkserver():  # it reads the end of its socket, unless it is stopped
                if self.forkserver is not None:
                    self._to_forkserver.send(self.forkserver.kill)
            case fx.KillForkserver():
                if self.forkserver is not None:
                    self.forkserver.kill()
            case fx.RequestFork():
                assert self.forkserver is not None
                self._to_forkserver.send(self._fork, self.forkserver, effect)
            case fx.AssignMover():
                self._on_result.pop(effect.request)(self.handles[effect.mover])
            case fx.RefuseRequest():
                self._on_result.pop(effect.request)(effect.error)
            case fx.KillProcess():
                if handle := self.handles.get(effect.mover):
                    handle.process.kill()
            case fx.ReportMessage():
                self._on_message(effect.mover, effect.message)
            case fx.ReportExit():
                self._on_exit(effect.mover)
            case fx.ReportStopped():
                self.is_stopped = True
            case fx.DiscardMover() | fx.ReportForkserverDeath() | fx.ReportEarlyDeath():
                pass
            case _:
                assert_never(effect)

    def _start_forkserver(self) -> None:
        process = SimulatedProcess(self._agenda, f"{self._owner.name}/forkserver", self._rng)
        self.forkserver = process
        self._from_forkserver = Pipe(self._owner, self._latency_s)
        self._to_forkserver = Pipe(process, self._latency_s)
        process.watch(lambda: self._from_forkserver.send(self._on_forkserver_exit))
        self._to_forkserver.delay(IMPORT_S)
        self._to_forkserver.send(self._reply, LibraryLoaded(library="simulated"))

    def _reply(self, message: LibraryLoaded | Forked) -> None:
        self._from_forkserver.send(self.feed, message)

    def _on_forkserver_exit(self) -> None:
        self.forkserver = None
        self.feed(ev.ForkserverExited())

    def _fork(self, forkserver: SimulatedProcess, effect: fx.RequestFork) -> None:
        process = forkserver.fork(effect.agent)
        handle = SimulatedHandle(effect.mover, effect.agent, process, Pipe(self._owner, self._latency_s))
        pid = next(self._pids)
        self._from_forkserver.send(self._on_forked, handle, pid)
        up = MoverUp(agent=effect.agent, library="simulated", pid=pid)
        process.after(self._rng.choice(AGENT_S), handle.to_daemon.send, self.report, handle, up)

    def _on_forked(self, handle: SimulatedHandle, pid: int) -> None:
        self.handles[handle.mover_id] = handle
        self.feed(Forked(mover=handle.mover_id, pid=pid))
        handle.process.watch(lambda: handle.to_daemon.send(self._report_exit, handle))

    def report(self, handle: SimulatedHandle, message: FromMover) -> None:
        """Take a message of a mover."""
        if not handle.has_exited:
            self.feed(ev.MoverReported(handle.mover_id, message))

    def _report_exit(self, handle: SimulatedHandle) -> None:
        if not handle.has_exited:
            handle.has_exited = True
            self.feed(ev.MoverExited(handle.mover_id))
            del self.handles[handle.mover_id]
