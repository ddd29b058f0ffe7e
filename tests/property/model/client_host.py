"""A node whose daemon may die, with processes that hold the real client session.

The source has a rank and a scheduler that publishes; the sink has a rank that reads, and a second rank of
the source's engine where that spans both nodes.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvxferd.client import events as ce
from kvxferd.client.registration import MemoryState
from kvxferd.client.session import PERMANENT_REFUSALS
from kvxferd.core import effects as fx
from kvxferd.core import events as ev
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.layout import EngineSpec, PackedBlocks, pack_ids, unpack_ids
from kvxferd.layout.presets import attention_layout
from kvxferd.wire import mover as mv
from kvxferd.wire import worker as wk
from kvxferd.wire.common import Message, TransferRef
from tests.property.model.digest import digest
from tests.property.model.host import (
    BLOCK_TOKENS,
    OVERWRITTEN,
    PAGE,
    Host,
    Job,
    Mover,
    Reach,
    Step,
    endpoint_of,
)
from tests.property.model.process import NUM_SLOTS, Page, Process

RETRY_S = 1.0
PAGE_BYTES = 1 << 16


class ClientHost(Host):
    """The source or the sink. One block a transfer."""

    def _start_workers(self) -> None:
        self.crashes = 0
        self.orphans: set[int] = set()  # movers of a daemon that is dead
        self.fences: dict[int, Page] = {}  # by session: the page that the daemon made for it
        self.pages: dict[int, dict[int, Page]] = {}  # by mover: the pages that it serves, by address
        self.processes: list[Process] = []
        self.scheduler: Process | None = None
        if self.name == "source":
            self._add_rank(self._engine("source"))
            self.scheduler = scheduler = self._add(Process(1, "scheduler", 0))
            scheduler.join_as(self._engine("source"), None)
            return
        self._add_rank(self._engine("sink"))
        if self.scenario.spans:
            member = self._add_rank(self._engine("source", tp_rank=1))
            member.memory = [0 if self.scenario.ready else 1]

    def _engine(self, name: str, tp_rank: int = 0) -> EngineSpec:
        is_source = name == "source"
        spans = is_source and self.scenario.spans
        return EngineSpec(
            name,
            "g",
            num_layers=1,
            tp_size=2 if spans else 1,
            tp_rank=tp_rank,
            num_kv_heads=2,
            publish_implies_ready=is_source and not self.scenario.ready,
            home=endpoint_of("source") if spans else "",
        )

    def _add(self, process: Process) -> Process:
        self.processes.append(process)
        return process

    def _add_rank(self, spec: EngineSpec) -> Process:
        is_source = spec.engine_id == "source"
        blocks = 1 if is_source else self.scenario.pulls
        cells = blocks * (2 if self.scenario.spans and not is_source else 1)
        layout = attention_layout(
            spec=spec, num_kv_heads=2, head_dim=2, block_tokens=BLOCK_TOKENS, num_blocks=blocks, layout="HND"
        )
        number = len(self.processes)
        process = self._add(Process(number, f"{spec.engine_id}-{spec.tp_rank}", cells))
        process.join_as(spec, layout)
        return process

    # --- what the exploration sees

    def key(self) -> bytes:
        node = self.node if self.is_up else None
        kept = (node, self.processes, self.movers, self.orphans, self.fences, self.pages, self.workers)
        return digest((kept, self.is_up, self.era, self.crashes, self.deaths), self.now)

    def due(self) -> bool:
        return any(at <= self.now for at in self._times())

    def deadlines(self) -> list[float]:
        moments = {at for at in self._times() if at > self.now}
        if self.is_up:
            moments |= {self.now + left for left in super().deadlines()}
        return sorted(moment - self.now for moment in moments)

    def _times(self) -> Iterator[float]:
        if self.is_up and (at := self.node.next_deadline()) is not None:
            yield at
        for process in self.processes:
            if (at := process.client.next_deadline()) is not None:
                yield at
            if process.session is None and process.retry_at > self.now:
                yield process.retry_at

    def reach(self) -> dict[str, Reach]:
        found: dict[str, Reach] = {}
        for mover in self.movers.values():
            if mover.alive:
                pages = self.pages.get(mover.mover, {})
                words = {at + 16 * s: word for at, p in pages.items() for s, word in p.words.items()}
                found[mover.agent] = (tuple(mover.worker.memory), words)
        return found

    def leftovers(self) -> list[str]:
        left = super().leftovers() if self.is_up else [f"{self.name}: its daemon is not there"]
        for process in self.processes:
            if len(process.client._pulls) or len(process.client._publishes):
                left.append(f"{process.name}: a pull or a publish")
        return left

    # --- the steps of processes and their daemon

    def process_steps(self) -> Iterator[Step]:
        """What processes and the daemon may do next."""
        if not self.is_up:
            if not self.orphans:
                yield ("start",)
        elif self.crashes < self.scenario.crashes[self.name == "sink"]:
            yield ("crash",)
        for mover in sorted(self.orphans):
            yield "perish", mover
        for process in self.processes:
            yield from self._steps_of(process)

    def _steps_of(self, process: Process) -> Iterator[Step]:
        client = process.client
        if self.is_up and process.session is None and process.retry_at <= self.now:
            yield "connect", process.number
        if process.up:
            yield "send", process.number
        if process.down:
            yield "read", process.number
        if process.name == "scheduler":
            yield from self._publishes(process)
        elif process.name == "sink-0":
            yield from self._pulls(process)
        elif client.registration.memory_state is MemoryState.SHARED:
            if self.scenario.ready and "ready 1" not in process.said:
                yield "ready", process.number, 1
            may_sleep = process.num_sleeps < self.scenario.sleeps and self._is_sleeper(process)
            if may_sleep and client.registration.was_registered:
                yield "suspend", process.number
        elif client.registration.memory_state is MemoryState.SUSPENDED:
            yield "resume", process.number

    def _is_sleeper(self, process: Process) -> bool:
        """Where the engine spans both nodes its member alone: the home's rank is as in one that does not."""
        return not self.scenario.spans or process.name == "source-1"

    def _publishes(self, scheduler: Process) -> Iterator[Step]:
        ranks = [p for p in self.processes if p is not scheduler]
        are_awake = all(p.client.registration.memory_state is MemoryState.SHARED for p in ranks)
        for number in range(1, self.scenario.transfers + 1):
            if f"publish {number}" not in scheduler.said:
                if (number == 1 or number - 1 in scheduler.released) and are_awake:
                    yield "publish", number
                return
            requested = f"unpublish {number}" in scheduler.said
            if self.scenario.unpublish and not requested and number not in scheduler.released:
                yield "unpublish", number

    def _pulls(self, process: Process) -> Iterator[Step]:
        for number in range(1, self.scenario.pulls + 1):
            if f"pull {number}" not in process.said:
                if number == 1 or number - 1 in process.ended:
                    yield "pull", process.number, number
                return
            requested = f"cancel {number}" in process.said
            if self.scenario.cancel and not requested and number not in process.ended:
                yield "cancel", process.number, number

    def _do_begin(self) -> None:
        for process in self.processes:
            self._do_connect(process.number)
            self._settle()

    def _do_crash(self) -> None:
        """The daemon is gone at once; its movers go when they see it."""
        self.crashes += 1
        self.is_up = False
        self.era += 1
        self.orphans = set()
        for mover in list(self.movers.values()):
            if mover.alive:
                self.orphans.add(mover.mover)
                mover.reports.clear()
            else:
                del self.movers[mover.mover]
        self.workers.clear()
        self.fences.clear()
        for process in self.processes:
            process.up.clear()
            process.down.clear()  # a daemon may die before it has sent all that it wanted to
            if process.session is not None:
                process.down.append(None)

    def _do_perish(self, number: int) -> None:
        self.orphans.discard(number)
        self._kill(self.movers[number])
        del self.movers[number]
        self.pages.pop(number, None)

    def _do_start(self) -> None:
        self.is_up = True
        self.node = self._start_node()

    def _do_connect(self, number: int) -> None:
        process = self.processes[number]
        process.session = next(self.numbers)
        self.workers[process.session] = process
        process.client.connection_made(self.now)
        self._feed(ev.WorkerConnected(process.session, 1, 0))

    def _do_send(self, number: int) -> None:
        process = self.processes[number]
        self._give(process, process.up.popleft())

    def _do_read(self, number: int) -> None:
        self._read(self.processes[number])

    def _do_publish(self, number: int) -> None:
        scheduler = self.scheduler
        assert scheduler is not None
        scheduler.said.add(f"publish {number}")
        if not self.scenario.ready:
            for process in self.processes:
                if process is not scheduler:
                    process.memory = [number]
        try:
            scheduler.client.publish(
                f"t{number}",
                {"full": PackedBlocks(pack_ids([0]))},
                num_tokens=BLOCK_TOKENS,
                num_readers=1,
                lease_s=None,
                now=self.now,
            )
        except EngineError:
            scheduler.released.add(number)  # it knows no rank of the engine, and says so
            return
        scheduler.client._publishes._live[f"t{number}"].nonce = "n"  # a replay must give the same one

    def _do_unpublish(self, number: int) -> None:
        assert self.scheduler is not None
        self.scheduler.said.add(f"unpublish {number}")
        self.scheduler.client.unpublish(f"t{number}")

    def _do_ready(self, number: int, transfer: int) -> None:
        process = self.processes[number]
        process.said.add(f"ready {transfer}")
        process.memory = [transfer]
        process.client.ready(f"t{transfer}", self.now)

    def _do_suspend(self, number: int) -> None:
        process = self.processes[number]
        process.num_sleeps += 1
        process.client.suspend()

    def _do_resume(self, number: int) -> None:
        """The engine maps memory anew: whatever it holds, it was not published."""
        process = self.processes[number]
        process.is_mapped = True
        process.client.resume(process.exports())

    def _do_pull(self, number: int, ticket: int) -> None:
        process = self.processes[number]
        process.said.add(f"pull {ticket}")
        blocks = {"full": PackedBlocks(pack_ids([ticket - 1]))}
        transfer = min(ticket, self.scenario.transfers)
        ref = TransferRef(endpoint_of("source"), "source", "g", f"t{transfer}", "n")
        process.client.pull(ref, blocks, BLOCK_TOKENS, self.now + 4.0, process.said.add)

    def _do_cancel(self, number: int, ticket: int) -> None:
        process = self.processes[number]
        process.said.add(f"cancel {ticket}")
        process.client.cancel(ticket)

    def _do_tick(self) -> None:
        if self.is_up:
            self._feed(ev.Tick())
        for process in self.processes:
            try:
                process.client.tick(self.now)
            except KvxferdError as error:
                self._drop(process, error)

    # --- connections

    def _settle(self) -> None:
        """Do whatever needs no decision, in order."""
        while self._settle_one():
            pass

    def _settle_one(self) -> bool:
        for process in self.processes:
            if process.events:
                self._happened(process, process.events.popleft())
                return True
        if self._local:
            self._feed(self._local.popleft())
            return True
        for process in self.processes:
            lags = self.scenario.lag and process.name == "scheduler"
            if process.down and not lags:
                self._read(process)
                return True
            if process.session in self.workers:  # else it talks to a daemon that is dead
                if (outgoing := process.client.pop_outgoing(self.now)) is not None:
                    process.up.append(outgoing.message)
                    return True
                if process.up and not lags:
                    self._give(process, process.up.popleft())
                    return True
        return False

    def _give(self, process: Process, message: Message) -> None:
        """A frame arrives at the daemon."""
        if process.session in self.workers:
            word = b""
            if isinstance(message, wk.Publish):
                word = self.fences[process.session].read(message.fence_slot)
            self._feed(ev.WorkerMessage(process.session, message, None, word))

    def _read(self, process: Process) -> None:
        """A frame arrives at the client, or the end of its connection."""
        entry = process.down.popleft()
        if entry is None:
            self._lose(process, KvxferdError("the daemon closed the connection", Code.DAEMON_LOST))
            return
        message, page, pidfd_of = entry
        if page is not None and process.client.carries_fence_page(message):
            process.client.offer_fence_page(page)
        if pidfd_of in self.movers and self.movers[pidfd_of].alive:
            process.watched.setdefault(process.client.epoch, set()).add(pidfd_of)
            self.watched.add(pidfd_of)
        try:
            process.client.handle(message, self.now)
        except KvxferdError as error:
            self._drop(process, error)

    def _drop(self, process: Process, error: KvxferdError) -> None:
        """The client gives the connection up."""
        session = process.session
        process.up.clear()
        process.down.clear()
        self._lose(process, error)
        if session is not None and self.is_up:
            self._feed(ev.WorkerDisconnected(session))
            self.workers.pop(session, None)

    def _lose(self, process: Process, error: KvxferdError) -> None:
        process.session = None
        process.retry_at = self.now + (0.0 if error.code is Code.DAEMON_LOST else RETRY_S)
        process.client.connection_lost(self.now, error.code, error.message)
        assert error.code not in PERMANENT_REFUSALS, f"the session of {process.name} ended: {error}"
        process.lost.add(process.client.epoch)
        process.judge()

    # --- the node

    def _feed(self, event: ev.Event) -> None:
        if self.is_up:
            super()._feed(event)

    def _act(self, effect: fx.Effect) -> None:
        match effect:
            case fx.SendToWorker():
                if process := self.workers.get(effect.session):
                    page = self.fences[effect.session] if effect.with_fence_page else None
                    process.down.append((effect.message, page, effect.pidfd_of))
            case fx.CreateFencePage():
                self.fences.setdefault(effect.session, self.workers[effect.session].new_page())
            case fx.OverwriteFenceWord():
                self.fences[effect.session].overwrite(effect.slot)
            case fx.CloseWorkerConnection():
                if process := self.workers.pop(effect.session, None):
                    process.up.clear()
                    process.down.append(None)
                self._local.append(ev.WorkerDisconnected(effect.session))
            case fx.ShareFencePage():
                address = PAGE + PAGE_BYTES * effect.session
                self.pages.setdefault(effect.mover, {})[address] = self.fences[effect.session]
                mapped = mv.FenceMapped(session=effect.session, address=address, metadata=b"")
                self._reply(effect.mover, mapped)
            case _:
                super()._act(effect)

    def _to_mover(self, mover: Mover, message: Message) -> None:
        if not isinstance(message, mv.StartPull):
            super()._to_mover(mover, message)
            return
        local, remote = (unpack_ids(side["full"].ids) for side in (message.local, message.remote))
        width = len(message.sources)
        pairs = [
            (width * mine + column, source.agent, theirs)
            for column, source in enumerate(message.sources)
            for mine, theirs in zip(local, remote, strict=True)
        ]
        mover.jobs[message.pull] = Job(message.pull, local[0] + 1, pairs, message.fence)

    def _kill(self, mover: Mover) -> None:
        super()._kill(mover)
        if mover.mover in self.orphans or not self.is_up:
            mover.reports.clear()
        mover.worker.mover_died(mover.mover)

    def _do_hear(self, number: int) -> None:
        if number in self.orphans:
            self.movers[number].reports.popleft()  # nobody listens
        else:
            super()._do_hear(number)

    # --- what an engine is told

    def _happened(self, process: Process, event: ce.Event) -> None:
        match event:
            case ce.Delivered():
                self._end(process, event.ticket.number, "delivered")
                width = len(process.memory) // self.scenario.pulls
                ticket = event.ticket.number
                found = process.memory[width * (ticket - 1) : width * ticket]
                transfer = min(ticket, self.scenario.transfers)
                assert found == [transfer] * width, f"t{transfer}: {found} was delivered"
            case ce.Failed():
                self._end(process, event.ticket.number, "failed" if event.safe_to_reuse else "in-doubt")
            case ce.Quiesced():
                number = event.ticket.number
                assert process.ended[number] == "in-doubt", f"ticket {number} was safe before"
                assert number not in process.quiet, f"ticket {number} was quiet before"
                process.quiet.add(number)
            case ce.Released() | ce.PublishRefused():
                self._over(process, int(event.transfer_id[1:]))
            case ce.Suspended():
                mappers = [m.agent for m in self.movers.values() if m.alive and m.worker is process]
                assert not mappers, f"{process.name} is suspended and mapped by {mappers}"
                process.is_mapped = False
                process.memory = [0] * len(process.memory)
            case ce.Disconnected():
                raise AssertionError(f"the session of {process.name} is over: {event.message}")

    def _over(self, process: Process, number: int) -> None:
        """Blocks are reused at once: on its own rank by a rank's word, on every rank by the publisher's."""
        if process is not self.scheduler:
            process.memory = [0] * len(process.memory)
            return
        assert number not in process.released, f"t{number} was released twice"
        process.released.add(number)
        word = process.fence._page.words.get((number - 1) % NUM_SLOTS, OVERWRITTEN)
        assert word == OVERWRITTEN, f"t{number} was released before its fence word"
        for rank in self.processes:
            rank.memory = [0] * len(rank.memory)

    def _notice(self, worker: Process, ticket: int) -> None:
        worker.client.handle_delivered_by_mover(
            wk.TicketDelivered(ticket=ticket, bytes=1, runs=1, wire_s=0.0)
        )
