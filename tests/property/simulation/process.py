"""An engine's process: the real client session, and what its I/O thread does around it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvxferd.client import Event, Released
from kvxferd.client.fence_slots import FenceSlots
from kvxferd.client.memory_export import MemoryExport
from kvxferd.client.registration import MemoryState, PublisherRole, RankRole, SessionRole
from kvxferd.client.session import PERMANENT_REFUSALS, ClientSession
from kvxferd.errors import Code, KvxferdError, ProtocolError
from kvxferd.ids import Incarnation, MoverId
from kvxferd.layout import EngineSpec
from kvxferd.wire import worker as wk
from kvxferd.wire.worker import RegionExport
from tests.property.simulation.agenda import Actor
from tests.property.simulation.daemon import Connection
from tests.property.simulation.memory import NUM_SLOTS, Buffer, FencePage, content_of, layout_of
from tests.property.simulation.mover import Mover
from tests.property.simulation.oracle import Violation

if TYPE_CHECKING:
    from tests.property.simulation.engine import Engine

RECONNECT_S = (0.05, 0.1, 0.2, 0.4, 0.8)
STABLE_S = 2.0
DELIVERY_FD = -1  # of the socket for deliveries, which is not one of the memory's descriptors
NO_ROOM_SHARE = 0.15  # of the movers' packets: the socket is full


class SimulatedExport(MemoryExport):
    """Memory that is offered to a daemon. Its one descriptor is a number of the process."""

    def close(self) -> None:
        """Nothing keeps the memory alive any more."""
        self.owners, self.fds = (), ()


class Process(Actor):
    """A rank, or a scheduler, which has no memory."""

    def __init__(self, engine: Engine, node_name: str, name: str, spec: EngineSpec | None) -> None:
        super().__init__(engine.world.agenda, name)
        self.engine = engine
        self.node_name = node_name
        self.spec = spec
        self.rng = random.Random(self.agenda.rng.random())
        self.clock = engine.world.clocks[node_name]
        self.memory: Buffer | None = None
        self.content = content_of(spec, engine.order) if spec is not None else None
        self.transfers = engine.transfers  # of its generation
        self.on_offered: Callable[[], None] | None = None  # called when it is offered a mover
        self.released: set[str] = set()  # ids of transfers that it was told are over
        self.owners: dict[int, object] = {}  # by block: the pull that may write it
        self.freed: dict[int, None] = {}  # blocks that were given back, and used for something else since
        self.movers: dict[Mover, None] = {}  # every mover that a daemon has made for it
        self.last_offered: Mover | None = None
        self.offered: set[Mover] = set()  # those whose pidfds it was sent
        self.connection: Connection | None = None
        self.has_descriptors = True
        self._memories: dict[int, Buffer] = {}  # by descriptor
        self._events: deque[Event] = deque()
        self._deliveries: deque[wk.TicketDelivered] = deque()
        self._watched: dict[int, dict[Mover, None]] = {}
        self._ended_epochs: dict[int, None] = {}
        self.on_registering: Callable[[], None] | None = None  # called once, when it sends a registration
        self._generation = ""
        self._num_mappings = 0
        self._num_attempts = 0
        self._connected_at = 0.0
        self._tick_at: float | None = None
        self._pages: list[FencePage] = []  # all that it has had
        self._fence = FenceSlots(NUM_SLOTS, self.rng.randbytes)
        self.session = ClientSession(name, self._fence, DELIVERY_FD, self._emitted, self.rng.randbytes)

    # --- what its engine has it do

    def start(self, generation: str) -> None:
        """Register, and connect."""
        self._generation = generation
        self.session.register(self._role())
        self._connect()

    def _role(self) -> SessionRole:
        if self.spec is None:
            return PublisherRole(self.engine.engine_id, self._generation)
        return RankRole(self.spec, layout_of(self.spec, self.engine.order), self.map_memory())

    def map_memory(self) -> SimulatedExport:
        """Allocate the rank's memory anew: whatever it holds, it was not published."""
        assert self.content is not None
        self._num_mappings += 1
        self.freed = {}
        self.memory = Buffer(f"{self.name}/memory{self._num_mappings}", self.content.size_bytes)
        self._memories[self._num_mappings] = self.memory
        self.engine.world.oracle.memories[self.memory] = self
        exports = SimulatedExport(
            (
                RegionExport(
                    layout_of(self.spec, self.engine.order).regions[0].region, self.content.size_bytes
                ),
            ),
            (self._num_mappings,),
        )
        exports.incarnation = Incarnation(f"{self.name}.{self._num_mappings}")
        return exports

    def act(self, what: str) -> None:
        """Call this after the engine has called the session."""
        self.note(what)
        self._after_session()

    def die(self) -> None:
        """The process is gone."""
        self.note("dies")
        self.is_alive = False
        if self.connection is not None:
            self.connection.close_from_process()
        for mover in self.movers:
            mover.after(self.rng.choice((0.0002, 0.005, 0.1)), mover.die, "its worker is gone")

    # --- the connection

    def _connect(self) -> None:
        if self.connection is not None or self.session.close_reason is not None:
            return
        self.engine.world.watcher.connecting(self)
        daemon = self.engine.world.daemons.get(self.node_name)
        if daemon is None:
            self._reconnect_later()
            return
        self._connected_at = self.agenda.now
        self.connection = daemon.connect(self)
        self.session.connection_made(self.clock.now())
        self._after_session()

    def _reconnect_later(self) -> None:
        step = RECONNECT_S[min(self._num_attempts, len(RECONNECT_S) - 1)]
        self._num_attempts += 1
        self.after(step * self.rng.uniform(0.8, 1.2), self._connect)

    def connection_ended(self, connection: Connection) -> None:
        """The daemon has closed the connection, or it is cut."""
        if connection is self.connection:
            self._disconnect(Code.DAEMON_LOST, "the daemon closed the connection")

    def read_half_a_frame(self, connection: Connection) -> None:
        """The connection is broken inside a frame."""
        if connection is self.connection:
            self._disconnect(Code.BAD_FRAME, "the connection ended inside a frame")

    def _disconnect(self, code: Code, why: str) -> None:
        connection = self.connection
        if connection is None:
            return
        self.note(f"disconnects: {code}")
        self.connection = None
        if connection.is_open:
            connection.close_from_process()
        if self.agenda.now - self._connected_at > STABLE_S:
            self._num_attempts = 0
        self._reconnect_later()
        self._receive_deliveries()
        self.session.connection_lost(self.clock.now(), code, why)
        if code in PERMANENT_REFUSALS:
            self.session.fail_permanently(code, why)
        epoch = self.session.epoch
        self._ended_epochs[epoch] = None
        self._report_if_all_exited(epoch)
        self._after_session()

    def receive(
        self,
        connection: Connection,
        message: wk.DaemonMessage,
        page: FencePage | None,
        mover: Mover | None,
    ) -> None:
        """Handle a frame of the daemon."""
        if connection is not self.connection or not connection.is_open:
            return
        if not self.has_descriptors and (page is not None or mover is not None):
            self._disconnect(Code.BAD_FRAME, "cannot take a frame whose descriptors were cut off")
            return
        carries_page = self.session.carries_fence_page(message)
        if carries_page:
            assert page is not None, "registered without a fence page"
            self._pages.append(page)
            self.session.offer_fence_page(page)
        if mover is not None:
            self._watched.setdefault(self.session.epoch, {})[mover] = None
            if mover.is_alive:
                mover.watchers[self, self.session.epoch] = None
            else:
                self.after(0.0, self.mover_exited, self.session.epoch, mover)
        if isinstance(message, wk.MoverOffered) and mover is not None:
            self.offered.add(mover)
            self.last_offered = mover
        if isinstance(message, wk.MoverOffered) and self.on_offered is not None:
            on_offered, self.on_offered = self.on_offered, None
            on_offered()
        try:
            self._receive_deliveries()
            self.session.handle(message, self.clock.now())
        except ProtocolError as error:
            text = f"{connection.daemon.name} says to {self.name} what it must not: {error.message}"
            raise Violation("violations", text) from error
        except KvxferdError as error:
            self._disconnect(error.code, error.message)
        self._after_session()

    def mover_exited(self, epoch: int, mover: Mover) -> None:
        """The pidfd of a mover is readable."""
        self._watched.get(epoch, {}).pop(mover, None)
        self._report_if_all_exited(epoch)
        self._after_session()

    def _report_if_all_exited(self, epoch: int) -> None:
        if epoch in self._ended_epochs and not self._watched.get(epoch):
            self._watched.pop(epoch, None)
            del self._ended_epochs[epoch]
            self._receive_deliveries()
            self.session.movers_exited(epoch)

    def receive_delivery(self, delivered: wk.TicketDelivered) -> bool:
        """Take a packet of a mover; return whether there was room."""
        if not self.is_alive or self.rng.random() < NO_ROOM_SHARE:
            return False
        self._deliveries.append(delivered)
        self.after(0.00005, self._drain)
        return True

    def _drain(self) -> None:
        if self._deliveries:
            self._receive_deliveries()
            self._after_session()

    def _receive_deliveries(self) -> None:
        while self._deliveries:
            self.session.handle_delivered_by_mover(self._deliveries.popleft())

    def _emitted(self, event: Event) -> None:
        """Keep an event until the session has returned. A word is overwritten before its blocks are free."""
        self._events.append(event)
        if isinstance(event, Released):
            live = self.session._publishes._live
            slots = {publish.slot for publish in live.values()}
            if event.transfer_id in live or any(page.live_slots - slots for page in self._pages):
                text = f"{self.name} is told that {event.transfer_id} is released, and its word proves reads"
                raise Violation("violations", text)

    def _check_pages(self) -> None:
        """Words of an earlier page prove nothing: whoever read them was granted that by an earlier daemon."""
        for page in self._pages:
            if page.live_slots and page is not self._fence._current_page:
                raise Violation(
                    "violations", f"{self.name} has another page, and words of {page.buffer.name}"
                )

    # --- what follows each call of the session

    def _after_session(self) -> None:
        connection = self.connection
        while (
            connection is not None and (outgoing := self.session.pop_outgoing(self.clock.now())) is not None
        ):
            message, memory = outgoing.message, None
            if isinstance(message, wk.Register) and self.spec is not None:
                self._check_is_shared()
            if isinstance(outgoing.message, wk.Register | wk.Resume):
                memory = self._memories[outgoing.fds[0]] if outgoing.fds else None
                on_registering, self.on_registering = self.on_registering, None
                if on_registering is not None:
                    on_registering()
            self.engine.world.watcher.sent_to_daemon(self, message)
            connection.up.send(connection.daemon.handle_worker_message, connection, message, memory)
        self._check_pages()
        while self._events:
            self.engine.handle(self, self._events.popleft())
        self._look_for_refusal()
        self._set_tick()

    def _check_is_shared(self) -> None:
        """Memory that its engine takes back is offered to no daemon: each knows the pidfds of its movers."""
        if self.session.registration.memory_state is not MemoryState.SHARED:
            raise Violation("violations", f"{self.name} suspends, and registers")

    def clock_jumped(self) -> None:
        """Look again when the next timer is due."""
        self._run(self._set_tick, ())

    def _set_tick(self) -> None:
        deadline = self.session.next_deadline()
        if deadline is None:
            return
        when = self.clock.when(deadline)
        if self._tick_at is None or when < self._tick_at:
            self._tick_at = when
            self.at(when, self._tick, when)

    def _look_for_refusal(self) -> None:
        """Have an engine whose `register` or `resume` was refused call it again."""
        registration = self.session.registration
        refusal = registration.reply_refusal
        if refusal is not None and not registration.caller_waits:
            registration.reply_refusal = None
            self.note(f"is refused: {refusal.code}")
            self.after(0.2, self._call_again)

    def _call_again(self) -> None:
        registration = self.session.registration
        if registration.role is None:
            self.session.register(self._role())
        elif registration.memory_state is MemoryState.SUSPENDED:
            self.session.resume(self.map_memory())
        self._after_session()

    def _tick(self, due: float) -> None:
        if due != self._tick_at:
            return
        self._tick_at = None
        try:
            self._receive_deliveries()
            self.session.tick(self.clock.now())
        except KvxferdError as error:
            self._disconnect(error.code, error.message)
        self._after_session()

    def living_movers(self) -> list[MoverId]:
        """Return the movers that were made for this process and are not dead."""
        return [mover.mover_id for mover in self.movers if mover.is_alive]
