"""A mover's process: the real pull engine, and what its loop does around it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from kvxferd.errors import Code
from kvxferd.ids import PullId, SessionId, Ticket
from kvxferd.mover.chunks.chunk_pool import ChunkPool, ChunkState
from kvxferd.mover.chunks.scatterer import Scatterer
from kvxferd.mover.process.loop import IDLE_CHECK_S
from kvxferd.mover.reads.pull_engine import PullEngine
from kvxferd.mover.transport.base import MemoryRange
from kvxferd.mover.transport.staging import StagedTransport
from kvxferd.plan import MAX_RUNS
from kvxferd.wire import mover as mv
from kvxferd.wire.block_id_parts import BlockIdAssembly
from kvxferd.wire.common import BlockIds, Message, RegionAddress
from kvxferd.wire.worker import TicketDelivered
from tests.property.simulation.agenda import Actor, Pipe
from tests.property.simulation.copying import CopyThread
from tests.property.simulation.memory import Buffer, FencePage
from tests.property.simulation.oracle import Pull
from tests.property.simulation.read_rules import ReadRules
from tests.property.simulation.told import blocks_of, check_is_over
from tests.property.simulation.transport import Fabric, SimulatedTransport

if TYPE_CHECKING:
    from tests.property.simulation.daemon import Daemon
    from tests.property.simulation.process import Process
    from tests.property.simulation.shells.mover_pool import SimulatedHandle

IN_USE = (ChunkState.READING, ChunkState.SCATTERING, ChunkState.DRAINING)
COPIES_S = (0.0, 0.0005, 0.1)  # of one mover: how long a copy takes; 0: it is in a step of the engine
MAX_RUNS_A_PART = (MAX_RUNS, 2)  # of one mover: how many runs of a pull are expanded at a time
POLL_S = 0.2  # a pull that waits for nothing that could wake its mover is looked at so often


class Mover(Actor):
    """One agent. Its daemon's messages come in order, and so do its own at the daemon."""

    def __init__(self, daemon: Daemon, handle: SimulatedHandle, process: Process, fabric: Fabric) -> None:
        super().__init__(daemon.agenda, handle.agent)
        self.daemon = daemon
        self.mover_id = handle.mover_id
        self.process = process
        self.agent = handle.agent
        self._os_process = handle.process
        self._os_process.watch(lambda: self.die("killed"))
        self.dies_at_delivery = False
        self.at_delivery: Callable[[Pull], None] | None = None  # called once, before anybody else knows
        self.watchers: dict[tuple[Process, int], None] = {}  # who watches it, by connection
        self.to_daemon = handle.to_daemon
        self.from_daemon = Pipe(self, daemon.local_latency_s)
        self.transport = SimulatedTransport(fabric, self.agent, self, self)
        outbox: deque[mv.FromMover] = deque()
        self._staged = StagedTransport(self.transport, lambda: self.agenda.now, report=outbox.append)
        self.on_write = fabric.on_write
        copy_s = daemon.rng.choice(COPIES_S)
        self._chunks = chunks = ChunkPool(self._staged, report=outbox.append)
        self._engine = PullEngine(
            self._staged,
            chunks,
            clock=lambda: self.agenda.now,
            outbox=outbox,
            scatterer=CopyThread(self, copy_s)
            if copy_s
            else Scatterer(lambda: self.agenda.now, starts_thread=False),
            max_runs=daemon.rng.choice(MAX_RUNS_A_PART),
        )
        self._rules = rules = ReadRules(self, chunks)
        self.transport.on_post, self.transport.on_doubt = rules.posted, rules.failed
        self.polls_for_others = False
        self.fences: dict[SessionId, int] = {}
        self._tickets: dict[PullId, Ticket] = {}  # of all pulls
        self._started: dict[PullId, mv.StartPull] = {}
        self.bound: Buffer | None = None
        self._early = BlockIdAssembly()
        self._is_step_due = False
        self._is_poll_due = False
        self._is_idle_check_due = False

    @property
    def serves(self) -> bool:
        """Whether it drives the library."""
        return self.is_alive and not self.is_stopped and (self.polls_for_others or self._engine.is_busy)

    def wake(self) -> None:
        """Step soon."""
        if not self._is_step_due and self.is_alive:
            self._is_step_due = True
            self.after(0.00002, self._step)

    def posted(self) -> None:
        """A read was posted."""
        self.daemon.world.reads(self)

    @property
    def num_chunks_in_use(self) -> int:
        """How many chunks are read into, or copied from."""
        return sum(map(self._chunks.count, IN_USE))

    def resume(self) -> None:
        super().resume()
        self.transport.serve()

    def blocks_to_write(self) -> set[int]:
        """Return the blocks of its worker that it may still write: of pulls that it has not called over."""
        return {block for start in self._started.values() for block in blocks_of(start)}

    def die(self, why: str) -> None:
        """The process is gone, and with it everything that it posted."""
        if not self.is_alive:
            return
        self.note(f"dies: {why}")
        self.is_alive = False
        self._engine.close()
        self._staged.close()
        self._os_process.end()
        for process, epoch in self.watchers:
            process.after(self.daemon.local_latency_s(), process.mover_exited, epoch, self)

    def _report(self, message: Message) -> None:
        self.to_daemon.send(self.daemon.handle_mover_message, self, message)

    # --- messages

    def bind(self, message: mv.Bind, memory: Buffer) -> None:
        """Map the worker's memory."""
        (export,) = message.regions
        self.bound = memory
        address = self.transport.map(memory)
        region = RegionAddress(export.region, address, export.size_bytes)
        self._engine.bind([region], read_way=message.read_way)
        metadata = self.transport.metadata([MemoryRange(address, export.size_bytes)])
        self._report(mv.Bound(regions=(region,), metadata=metadata))
        self.daemon.world.oracle.mover_bound(self, memory)

    def map_fence(self, session: SessionId, page: FencePage) -> None:
        """Map a session's fence page."""
        address = self.transport.map(page.buffer)
        self.fences[session] = address
        metadata = self.transport.metadata([MemoryRange(address, len(page.buffer.bytes))])
        self._report(mv.FenceMapped(session=session, address=address, metadata=metadata))

    def handle(self, message: Message) -> None:
        """Handle a message of the daemon."""
        match message:
            case mv.UnmapFence():
                address = self.fences.pop(message.session, None)
                if address is not None:
                    self.transport.blank(address)
            case mv.SetPolling():
                self.polls_for_others = message.on
                if message.on:
                    self._report(mv.Polling(token=message.token))
                    self.transport.serve()
            case mv.LoadPlan():
                self._engine.load_plan(message.digest, message.encoded)
            case mv.LoadRemote():
                self._engine.add_remote(message.agent, message.metadata, message.word)
            case mv.DropRemote():
                self._engine.drop_remote(message.agent)
            case BlockIds():
                self._early.add(message)
            case mv.StartPull() if self._dies_of(message):
                return
            case mv.StartPull():
                if message.ticket is not None:
                    self._tickets[message.pull] = message.ticket
                local = self._early.complete(message.local, message.stream)
                remote = self._early.complete(message.remote, message.stream + 1)
                whole = msgspec.structs.replace(message, local=local, remote=remote)
                self._started[message.pull] = whole
                self._rules.handle(whole)
                self._engine.start(whole)
            case mv.AbortPull():
                self._rules.handle(message)
                self._engine.abort(message.pull)
            case mv.ReportPull():
                self._engine.report_progress(message.pull)
            case mv.ChunkMemoryGranted():
                self._rules.handle(message)
                self._chunks.set_grant(message.num_chunks, self.agenda.now)
        self.wake()

    def _dies_of(self, start: mv.StartPull) -> bool:
        pull = self._pull_of(start.ticket)
        if pull is None or not self.daemon.world.oracle.read_kills(pull):
            return False
        self.die("of what it reads")
        return True

    def _pull_of(self, ticket: Ticket | None) -> Pull | None:
        return None if ticket is None else self.process.engine.pulls.get((self.process, ticket))

    def _step(self) -> None:
        self._is_step_due = False
        while self._engine.is_busy and self._engine.step():
            pass
        if self.transport.broken is not None:
            raise self.transport.broken
        if self.transport.waiting:
            self.transport.serve()
        outbox = self._engine.outbox
        while outbox:
            self._report_engine(outbox.popleft())
        if self.is_alive:
            self._rules.check(self._engine._by_id)
        if self._chunks.is_wanted and not self._is_idle_check_due:
            self._is_idle_check_due = True
            self.after(IDLE_CHECK_S, self._check_idle)
        if self._engine.is_busy and not self._is_poll_due:
            self._is_poll_due = True
            self.after(POLL_S, self._poll)

    def _poll(self) -> None:
        self._is_poll_due = False
        self.wake()

    def _check_idle(self) -> None:
        self._is_idle_check_due = False
        self._chunks.release_idle(self.agenda.now)
        self.wake()

    def _check_is_over(self, message: mv.FromMover) -> None:
        match message:
            case mv.PullDone() if message.outcome.delivered or message.outcome.finished:
                check_is_over(self, self._started.pop(message.pull))
            case mv.PullQuiesced():
                check_is_over(self, self._started.pop(message.pull))

    def _report_engine(self, message: mv.FromMover) -> None:
        self._check_is_over(message)
        self._rules.reported(message)
        if isinstance(message, mv.PullDone):
            ticket = self._tickets.pop(message.pull, None)
            outcome = message.outcome
            is_over = outcome.finished or not outcome.started
            if is_over and outcome.code is Code.TRANSPORT and (pull := self._pull_of(ticket)) is not None:
                pull.num_failed += 1
            if ticket is not None and outcome.delivered:
                self.process.engine.landed(self.process, ticket)
                at_delivery, self.at_delivery = self.at_delivery, None
                if at_delivery is not None and (pull := self._pull_of(ticket)) is not None:
                    at_delivery(pull)
            if ticket is not None and outcome.delivered:
                told = TicketDelivered(
                    ticket=ticket, bytes=outcome.bytes, runs=outcome.runs, wire_s=outcome.wire_s
                )
                if self.process.receive_delivery(told):
                    outcome = msgspec.structs.replace(outcome, sent_to_worker=True)
                    message = msgspec.structs.replace(message, outcome=outcome)
                    if self.dies_at_delivery:
                        self.die("before it reports a delivery")
                        return
        self._report(message)
