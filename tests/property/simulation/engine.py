"""An engine: its processes, the blocks that it publishes and pulls, and what it does with events."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvxferd.client import events as ce
from kvxferd.client.gpu_events import unfinished
from kvxferd.client.registration import MemoryState
from kvxferd.client.session import SessionState
from kvxferd.errors import Code, KvxferdError
from kvxferd.layout import EngineSpec, PackedBlocks, pack_ids
from kvxferd.wire.common import TransferRef
from kvxferd.wire.worker import Abandon, Prepare
from tests.property.simulation.daemon import endpoint_of
from tests.property.simulation.growth import Growth
from tests.property.simulation.memory import BLOCK_TOKENS, NUM_BLOCKS, NUM_HEADS, POISON, Buffer
from tests.property.simulation.oracle import GpuWork, Pull, Violation, Wanted
from tests.property.simulation.process import Process
from tests.property.simulation.readers import Readers
from tests.property.simulation.told import check_is_free, check_reason

if TYPE_CHECKING:
    from tests.property.simulation.daemon import Connection, Daemon
    from tests.property.simulation.world import World

MAX_ATTEMPTS = 3
SHORT_SHARE = 0.12  # of the pulls: their deadline is about when they end
EARLY_SHARE = 0.2  # of the transfers: ranks say ready before the publish, or of what is never published
NUM_LAYERS = 2
REUSED = 0xEE  # what an engine writes into blocks that it was given back

RELEASED_WITHIN_S = 1.5  # after a rank sleeps


@dataclass(frozen=True)
class EngineShape:
    """What an engine is: a source or a sink. The first rank's node is the home of all ranks."""

    name: str
    node_names: tuple[str, ...]  # of each rank
    is_source: bool
    tp_size: int
    order: str
    has_scheduler: bool
    says_ready: bool  # each rank says when it has written
    has_gpu: bool = False  # ranks write and free blocks in work that is done some time after its launch
    grows: bool = False  # some transfers are published before they are whole

    @property
    def spans_nodes(self) -> bool:
        """Whether a rank is on another node than its home."""
        return len(set(self.node_names)) > 1


@dataclass(eq=False)
class Transfer:
    """What was published."""

    number: int
    transfer_id: str
    ids: list[int]
    num_tokens: int
    num_readers: int
    readers: Readers
    publisher: Process
    ranks: list[Process]  # of its generation
    ref: TransferRef | None = None
    grows: bool = False
    is_slow: bool = False  # it grows for longer than a reader waits that wants it whole
    released_on: set[str] = field(default_factory=set)  # processes, by name
    is_over: bool = False
    uses_up_its_id: bool = False  # it is over, and no daemon refused it


class Engine:
    """One engine through all of its lives. Its processes have no other way to talk than this object."""

    def __init__(self, world: World, shape: EngineShape) -> None:
        self.world = world
        self.shape = shape
        self.engine_id = shape.name
        self.order = shape.order
        self.rng = random.Random(world.agenda.rng.random())
        self.life = 0
        self.ranks: list[Process] = []
        self.scheduler: Process | None = None
        self.transfers: dict[str, Transfer] = {}
        self.past: list[Transfer] = []  # those that are over, of all lives
        self._num_published = 0  # in this life: each begins with the same transfer ids
        self.pulls: dict[tuple[Process, int], Pull] = {}
        self.is_up = False
        self.num_working = 0  # pieces of GPU work that are not done
        self._num_processes = 0

    # --- its processes

    def start(self) -> None:
        """Start all processes, as a new generation."""
        self.life += 1
        self.is_up = True
        self.transfers = {}
        self._num_published = 0
        self.ranks = [self._start_rank(tp_rank) for tp_rank in range(self.shape.tp_size)]
        self.scheduler = None
        if self.shape.has_scheduler and self.shape.is_source:
            self.scheduler = self._make("scheduler", None, self.shape.node_names[0])
            self.scheduler.start(self.generation)

    @property
    def generation(self) -> str:
        """The present life's."""
        return f"g{self.life}"

    @property
    def processes(self) -> list[Process]:
        """All of them."""
        return self.ranks if self.scheduler is None else [*self.ranks, self.scheduler]

    @property
    def publisher(self) -> Process:
        """Who publishes."""
        return self.scheduler or self.ranks[0]

    def _start_rank(self, tp_rank: int) -> Process:
        spec = EngineSpec(
            self.shape.name,
            self.generation,
            num_layers=NUM_LAYERS,
            tp_size=self.shape.tp_size,
            tp_rank=tp_rank,
            num_kv_heads=NUM_HEADS,
            home=endpoint_of(self.shape.node_names[0]) if self.shape.spans_nodes else "",
            publish_implies_ready=self.shape.is_source and not self.shape.says_ready,
        )
        process = self._make(f"rank{tp_rank}", spec, self.shape.node_names[tp_rank])
        process.start(self.generation)
        return process

    def _make(self, role: str, spec: EngineSpec | None, node_name: str) -> Process:
        self._num_processes += 1
        name = f"{self.shape.name}.{self.life}/{role}.{self._num_processes}"
        return Process(self, node_name, name, spec)

    def die(self) -> None:
        """All processes are gone."""
        self.is_up = False
        for process in self.processes:
            self._kill(process)
        self.past += self.transfers.values()
        self.transfers = {}

    def replace_rank(self, tp_rank: int) -> None:
        """A rank's process dies, and another takes its place: not the publisher's."""
        self._kill(self.ranks[tp_rank])
        self.ranks[tp_rank] = self._start_rank(tp_rank)

    def scale(self, node_names: tuple[str, ...], overlap_s: float) -> None:
        """Have another generation with a rank on each of these nodes take over; this one dies later."""
        old, transfers = self.processes, self.transfers
        self.shape = replace(self.shape, node_names=node_names, tp_size=len(node_names))
        self.start()
        self.world.agenda.after(overlap_s, self._retire, old, transfers)

    def _retire(self, processes: list[Process], transfers: dict[str, Transfer]) -> None:
        for process in processes:
            if process.is_alive:
                self._kill(process)
        self.past += transfers.values()
        transfers.clear()

    def _kill(self, process: Process) -> None:
        process.die()
        self.world.oracle.process_died(process)

    @property
    def is_usable(self) -> bool:
        """Whether every process may be called."""
        return self.is_up and all(
            process.is_alive
            and not process.is_stopped
            and process.session.close_reason is None
            and process.session.registration.was_registered
            and (
                process.spec is None
                or (
                    process.session.registration.memory_state is MemoryState.SHARED
                    and process.memory is not None
                )
            )
            for process in self.processes
        )

    @property
    def is_ready(self) -> bool:
        """Whether every process is registered now."""
        return self.is_usable and all(p.session.state is SessionState.READY for p in self.processes)

    # --- as a source

    def publish(
        self, num_readers: int = 1, lease_s: float | None = None, prefill_s: float | None = None
    ) -> Transfer | None:
        """Write a request and publish it; None where that cannot be now.

        `prefill_s`: how long after the publish it is whole, where the engine `can_grow`; None: drawn.
        """
        used = {block for transfer in self.transfers.values() for block in transfer.ids}
        free = [block for block in range(NUM_BLOCKS) if block not in used]
        num_blocks = self.rng.choice((2, 3, 3, 4) if self.shape.grows else (1, 2, 2, 3))
        if not self.is_usable or len(free) < num_blocks:
            return None
        number = self.world.take_number()
        ids = self.rng.sample(free, num_blocks)
        num_tokens = self.rng.randint((num_blocks - 1) * BLOCK_TOKENS + 1, num_blocks * BLOCK_TOKENS)
        self._num_published += 1
        readers = Readers(num_readers)
        transfer_id, publisher = f"t{self._num_published}", self.publisher
        transfer = Transfer(number, transfer_id, ids, num_tokens, num_readers, readers, publisher, self.ranks)
        growth = self._draw_growth(transfer, prefill_s)
        transfer.grows, transfer.is_slow = bool(growth.steps), prefill_s is not None
        written = GpuWork(is_done=True)
        for process in self.ranks:
            if process is publisher:
                written = self._launch(process, self._write, transfer, growth.begins_with)
            elif not self.shape.says_ready:
                self._write(process, process.memory, transfer, growth.begins_with)
        self.transfers[transfer.transfer_id] = transfer
        others = [process for process in self.ranks if process is not publisher and self.shape.says_ready]
        is_early = not growth.steps and self.rng.random() < EARLY_SHARE
        for process in others if is_early else ():
            self._write_and_say(process, transfer)
        try:
            transfer.ref = publisher.session.publish(
                transfer.transfer_id,
                {"full": PackedBlocks(pack_ids(growth.blocks_at_first))},
                num_tokens=num_tokens,
                num_readers=num_readers,
                lease_s=lease_s,
                now=publisher.clock.now(),
                after=unfinished(written),
                ready_tokens=growth.ready_tokens,
            )
        except KvxferdError:
            del self.transfers[transfer.transfer_id]
            return None
        self.world.watcher.published(self, transfer)
        text = f"content {number} in {ids} for {num_readers} readers"
        publisher.act(f"publishes {transfer.transfer_id}, {text}{growth}")
        if growth.steps:
            growth.start(self)
        else:
            for process in others if not is_early else ():
                delay = self.rng.choice((0.0, 0.001, 0.02))
                process.after(delay, self._write_and_say, process, transfer)
        if self.rng.random() < EARLY_SHARE:  # of a request that is aborted before anybody publishes it
            for process in others:
                process.session.ready(f"aborted{number}", process.clock.now())
        return transfer

    @property
    def can_grow(self) -> bool:
        """Whether it reports what is written: a scheduler whose ranks do not say ready cannot."""
        return self.scheduler is None or self.shape.says_ready

    def _draw_growth(self, transfer: Transfer, prefill_s: float | None) -> Growth:
        is_whole = not self.shape.grows or self.world.fabric.is_hurried or self.rng.random() < 0.2
        if not self.can_grow or (is_whole and prefill_s is None):
            return Growth(transfer, [])
        num_steps = min(transfer.num_tokens, self.rng.choice((1, 2, 3)))
        return Growth(transfer, self.rng.sample(range(transfer.num_tokens), num_steps), prefill_s)

    def write_more(self, process: Process, transfer: Transfer, tokens: int) -> GpuWork | None:
        """Have a rank write up to a token; None where it is not to, or cannot."""
        if transfer.is_over or process.name in transfer.released_on or not process.is_alive:
            return None
        if process.session.registration.memory_state is not MemoryState.SHARED:
            return None
        if not self.shape.says_ready:  # the publisher reports for all
            for other in transfer.ranks:
                if other is not process:
                    self._write(other, other.memory, transfer, tokens)
        return self._launch(process, self._write, transfer, tokens)

    def _write(
        self, process: Process, memory: Buffer | None, transfer: Transfer, num_tokens: int | None = None
    ) -> None:
        if transfer.is_over or process.name in transfer.released_on or memory is None or memory.is_freed:
            return
        assert process.content is not None
        tokens = transfer.num_tokens if num_tokens is None else num_tokens
        process.content.fill(memory.bytes, transfer.ids, tokens, transfer.number)

    def _launch(self, process: Process, act: Callable[..., None], *arguments: object) -> GpuWork:
        """Have a rank's GPU do something with its present memory, at once where the engine has none."""
        work = GpuWork()
        if self.shape.has_gpu and not self.world.fabric.is_hurried:
            delay_s = self.rng.choice((0.0, 0.001, 0.02, 0.3))
            self.num_working += 1
            self.world.agenda.after(delay_s, self._later_done, work, act, process, process.memory, *arguments)
        else:
            self._gpu_done(work, act, process, process.memory, *arguments)
        return work

    @staticmethod
    def _use_no_more(process: Process, memory: Buffer | None) -> None:
        """The last kernel that reads blocks which are pulled into next."""

    def _later_done(self, work: GpuWork, act: Callable[..., None], *arguments: object) -> None:
        self.num_working -= 1
        self._gpu_done(work, act, *arguments)

    @staticmethod
    def _gpu_done(work: GpuWork, act: Callable[..., None], *arguments: object) -> None:
        act(*arguments)
        work.is_done = True

    def _write_and_say(self, process: Process, transfer: Transfer) -> None:
        if transfer.is_over or process.name in transfer.released_on or process not in transfer.ranks:
            return
        if process.session.registration.memory_state is not MemoryState.SHARED:
            return
        work = self._launch(process, self._write, transfer)
        process.session.ready(transfer.transfer_id, process.clock.now(), after=unfinished(work))
        process.act(f"ready {transfer.transfer_id}")

    def unpublish(self, transfer: Transfer) -> None:
        """Withdraw a transfer."""
        self.world.watcher.withdrawn(self, transfer)
        transfer.publisher.session.unpublish(transfer.transfer_id)
        transfer.publisher.act(f"unpublishes {transfer.transfer_id}")

    def republish(self, transfer: Transfer) -> None:
        """Use a transfer's id for other blocks."""
        publisher = transfer.publisher
        ids = [block for block in range(NUM_BLOCKS) if block not in transfer.ids][:1]
        blocks = {"full": PackedBlocks(pack_ids(ids))}
        try:
            publisher.session.publish(
                transfer.transfer_id,
                blocks,
                num_tokens=1,
                num_readers=1,
                lease_s=None,
                now=publisher.clock.now(),
            )
        except KvxferdError:
            return
        raise Violation("violations", f"{transfer.transfer_id} was published twice by {publisher.name}")

    def _expect_releases(self, process: Process) -> None:
        """A rank sleeps: what its engine has published ends, if its daemon is there and hears of it."""
        daemon = self.world.daemons.get(process.node_name)
        published = [transfer for transfer in process.transfers.values() if self._is_sent(transfer)]
        if daemon is None or self.shape.spans_nodes or not published or process.connection is None:
            return
        session = daemon.node.sessions.get(process.connection.session)
        if session is None or session.rank is None:
            return  # what its engine publishes ends when it has registered
        publisher = published[0].publisher
        self.world.agenda.after(
            RELEASED_WITHIN_S, self._check_released, daemon, publisher, publisher.connection, published
        )

    @staticmethod
    def _is_sent(transfer: Transfer) -> bool:
        """Whether the publisher's daemon has been sent the publish."""
        session = transfer.publisher.session
        publish = session._publishes._live.get(transfer.transfer_id)
        return publish is not None and publish.sent_epoch == session.epoch

    def _check_released(
        self,
        daemon: Daemon,
        publisher: Process,
        connection: Connection | None,
        published: list[Transfer],
    ) -> None:
        began = self.world.agenda.now - RELEASED_WITHIN_S
        if connection is None or publisher.connection is not connection or not connection.is_open:
            return  # it has another daemon now, or will
        if not publisher.is_alive or max(publisher.last_stop_at, daemon.last_stop_at) >= began:
            return
        if publisher.is_stopped or daemon.is_stopped or not daemon.is_alive:
            return
        if publisher.session.registration.memory_state is MemoryState.SUSPENDING:
            return  # it sleeps too, and keeps what it has not sent until nobody has its memory
        if late := [transfer.transfer_id for transfer in published if not transfer.is_over]:
            raise Violation("violations", f"a rank of {self.engine_id} sleeps, and {late} are not released")

    def _released(self, process: Process, transfer_id: str, why: Code | None = None) -> None:
        """The process may use the blocks again: it does so at once. `why`: None where it was refused."""
        process.released.add(transfer_id)
        transfer = process.transfers.get(transfer_id)
        if transfer is None:
            return
        if why is not None:
            transfer.readers.check_released(transfer_id, why)
        if process.name in transfer.released_on:
            raise Violation("violations", f"{transfer_id} was released twice for {process.name}")
        transfer.released_on.add(process.name)
        over = transfer.ranks if process is transfer.publisher else [process] if process.spec else []
        for rank in over:
            assert rank.content is not None
            if rank.memory is not None:
                rank.content.overwrite(rank.memory.bytes, transfer.ids, POISON)
        if process is transfer.publisher:
            transfer.is_over = True
            transfer.uses_up_its_id = why is not None
            self.past.append(process.transfers.pop(transfer_id))

    # --- as a sink

    def pull(self, transfer: Transfer, timeout_s: float | None = None) -> bool:
        """Have every rank pull a transfer; return whether any could."""
        if not self.is_usable:
            return False
        for process in self.ranks:
            self._pull(process, transfer, Wanted(), timeout_s)
        return True

    def _pull(
        self, process: Process, transfer: Transfer, wanted: Wanted, timeout_s: float | None = None
    ) -> None:
        free = [block for block in range(NUM_BLOCKS) if block not in process.owners]
        if len(free) < len(transfer.ids) or transfer.ref is None:
            return
        ids = self.rng.sample(free, len(transfer.ids))
        self.check_free_blocks(process, ids)
        short = self.rng.random() < SHORT_SHARE
        timeout_s = timeout_s or self.rng.choice((0.005, 0.03, 0.2) if short else (1.0, 3.0, 8.0))
        deadline = self.world.agenda.now + timeout_s
        session = process.session
        after = self._launch(process, self._use_no_more)
        try:
            ticket = session.pull(
                transfer.ref,
                {"full": PackedBlocks(pack_ids(ids))},
                transfer.num_tokens,
                process.clock.now() + timeout_s,
                session.cancel,
                after=unfinished(after),
                progressive=transfer.is_slow or self.rng.random() < (0.8 if transfer.grows else 0.3),
            ).number
        except KvxferdError:
            return
        if not wanted.attempts:
            self.world.oracle.wanted.append(wanted)
        wanted.attempts += 1
        pull = Pull(process, ticket, transfer.number, ids, transfer.num_tokens, deadline, wanted, after)
        self.pulls[process, ticket] = pull
        for block in ids:
            process.owners[block] = pull
        self.world.oracle.pull_started(pull)
        self.world.pull_started()
        self.world.transfer_of[pull] = transfer
        process.act(f"pulls {transfer.transfer_id} of {transfer.ref.engine_id} into {ids}, ticket {ticket}")

    def cancel(self, pull: Pull) -> None:
        """Cancel a pull."""
        pull.process.session.cancel(pull.ticket)
        pull.process.act(f"cancels {pull.ticket}")

    @staticmethod
    def abandon(process: Process, transfer: Transfer) -> None:
        """Have a rank say that no rank of its engine will read the transfer any more."""
        assert transfer.ref is not None
        transfer.readers.abandoned(process)
        process.session.queue_one_way(Abandon(ref=transfer.ref))
        process.act(f"abandons {transfer.transfer_id}")

    def prepare(self, transfer: Transfer) -> None:
        """Announce a pull."""
        if self.is_usable and transfer.ref is not None:
            self.ranks[0].session.queue_one_way(Prepare(ref=transfer.ref))
            self.ranks[0].act(f"prepares {transfer.transfer_id}")

    # --- sleep

    def sleep(self, process: Process) -> None:
        """Have a rank suspend."""
        process.session.suspend()
        process.act("suspends")

    def wake(self, process: Process) -> bool:
        """Have a rank come back with other memory; return False while it may not."""
        if process.session.registration.memory_state is not MemoryState.SUSPENDED:
            return False
        process.session.resume(process.map_memory())
        process.act("resumes")
        return True

    # --- events

    def handle(self, process: Process, event: ce.Event) -> None:
        """Handle an event of a session, as an engine does that polls at once."""
        process.note(_text(event))
        self.world.watcher.handled(process, event)
        match event:
            case ce.Delivered():
                self._pull_ended(process, event.ticket.number, "delivered")
            case ce.Failed():
                check_reason(process, event)
                how = "failed" if event.safe_to_reuse else "in-doubt"
                self._pull_ended(process, event.ticket.number, how)
            case ce.Quiesced():
                pull = self.pulls[process, event.ticket.number]
                self.world.oracle.pull_quiesced(pull)
                self._free(pull)
            case ce.Released():
                self._released(process, event.transfer_id, event.why)
            case ce.PublishRefused():
                self._released(process, event.transfer_id)
            case ce.Suspended():
                self._expect_releases(process)
                self.world.oracle.suspended(process)
                self._check_nothing_is_published(process)
                assert process.memory is not None
                process.memory.bytes[:] = bytes([POISON]) * len(process.memory.bytes)
                process.memory.is_freed = True
                process.memory = None
            case ce.Disconnected() if process in self.processes:
                raise Violation("violations", f"the session of {process.name} ended: {event.message}")

    @staticmethod
    def _check_nothing_is_published(process: Process) -> None:
        """What a rank has published is released before its memory is given back."""
        live = [t.transfer_id for t in process.transfers.values() if t.publisher is process]
        if live and process.spec is not None:
            raise Violation("violations", f"{process.name} is suspended, and {live} are not released")

    def _pull_ended(self, process: Process, ticket: int, how: str) -> None:
        pull = self.pulls[process, ticket]
        self.world.oracle.pull_ended(pull, how)
        if how != "in-doubt":
            self._free(pull)
        if how != "delivered" and pull.wanted.attempts < MAX_ATTEMPTS:
            process.after(self.rng.choice((0.01, 0.2, 1.0)), self._retry, process, pull)

    def landed(self, process: Process, ticket: int) -> None:
        """The mover of a rank reports that a pull is delivered."""
        self.world.transfer_of[self.pulls[process, ticket]].readers.landed(process)

    def _retry(self, process: Process, pull: Pull) -> None:
        if self.is_usable and process in self.ranks and not pull.wanted.is_delivered:
            self._pull(process, self.world.transfer_of[pull], pull.wanted)

    def _free(self, pull: Pull) -> None:
        """The blocks may be used again: they are, at once."""
        process = pull.process
        check_is_free(process, pull.ids)
        for block in pull.ids:
            del process.owners[block]
        if process.memory is not None:
            assert process.content is not None
            process.content.overwrite(process.memory.bytes, pull.ids, REUSED)
            process.freed |= dict.fromkeys(pull.ids)

    @staticmethod
    def check_free_blocks(process: Process, ids: list[int]) -> None:
        """Blocks that were given back hold what the engine has written there since."""
        assert process.content is not None
        assert process.memory is not None
        for block in ids:
            if block in process.freed:
                del process.freed[block]
                if not process.content.holds(process.memory.bytes, block, REUSED):
                    text = f"block {block} of {process.name} was written after it was said to be safe"
                    raise Violation("violations", text)

    def leftovers(self) -> list[str]:
        """Return what sessions at rest would not hold."""
        found = []
        for process in self.processes:
            session = process.session
            if len(session._pulls) or len(session._publishes):
                found.append(
                    f"{process.name}: {len(session._pulls)} pulls, {len(session._publishes)} publishes"
                )
            if process.memory is not None:
                self.check_free_blocks(process, list(process.freed))
            if process.owners:
                found.append(f"{process.name}: blocks {sorted(process.owners)} are in doubt")
            if session.registration.memory_state is MemoryState.SUSPENDING:
                found.append(f"{process.name}: never suspended")
        return [*found, *(f"{self.engine_id}: {transfer} is not released" for transfer in self.transfers)]


def _text(event: ce.Event) -> str:
    match event:
        case ce.Failed():
            return f"Failed {event.ticket.number} {event.code} safe={event.safe_to_reuse}: {event.message}"
        case ce.Delivered() | ce.Quiesced():
            return f"{type(event).__name__} {event.ticket.number}"
        case ce.Released() | ce.PublishRefused():
            why = event.why if isinstance(event, ce.Released) else event.message
            return f"{type(event).__name__} {event.transfer_id} {why}"
        case _:
            return str(event)
