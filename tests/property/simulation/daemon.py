"""A daemon: the real core, and what its shells do with the effects."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from kvxferd.core import Node, Settings
from kvxferd.core import effects as fx
from kvxferd.core import events as ev
from kvxferd.core.limits.table import ARRIVING_ID_BYTES
from kvxferd.errors import Code, MoverError
from kvxferd.ids import BootId, Endpoint, GrantId, MoverId, SessionId
from kvxferd.wire import mover as mv
from kvxferd.wire import worker as wk
from kvxferd.wire.common import Message, Refusal
from kvxferd.wire.peer import JoinRank
from tests.property.simulation.agenda import Actor, Pipe
from tests.property.simulation.memory import Buffer, FencePage
from tests.property.simulation.mover import Mover
from tests.property.simulation.oracle import Violation
from tests.property.simulation.shells.mover_pool import SimulatedHandle, SimulatedPool
from tests.property.simulation.told import ToldWorker, check_ended, check_new_grants, check_word
from tests.support.sim.node import SimNode

if TYPE_CHECKING:
    from tests.property.simulation.process import Process
    from tests.property.simulation.world import World


class Connection:
    """One connection of a process to its daemon. Both ends learn of its end, each in its own time."""

    def __init__(self, daemon: Daemon, process: Process, session: SessionId) -> None:
        self.daemon = daemon
        self.process = process
        self.session = session
        self.is_open = True
        self.up = Pipe(daemon, daemon.local_latency_s)
        self.down = Pipe(process, daemon.local_latency_s)
        self.offered: Buffer | None = None  # the memory that came with the last registration
        self.memory: Buffer | None = None  # that is the rank's
        self.page: FencePage | None = None
        self.told = ToldWorker(process.name)

    def close_from_process(self) -> None:
        """The process closes its end, or is gone."""
        self.is_open = False
        self.up.send(self.daemon.connection_ended, self)

    def close_from_daemon(self) -> None:
        """The daemon closes its end, or is gone: what it has sent still arrives."""
        self.down.send(self.process.connection_ended, self)

    def cut_at_daemon(self) -> None:
        """Have the daemon read half a frame: it reads no more, and what it has sent still arrives."""
        self.daemon.after(self.daemon.local_latency_s(), self.daemon.end_connection, self)

    def cut_at_process(self) -> None:
        """Have the process read half a frame: it reads no more, and what it has sent still arrives."""
        self.process.after(self.daemon.local_latency_s(), self.process.read_half_a_frame, self)

    def cut(self) -> None:
        """Break it: what is under way is lost."""
        self.is_open = False
        self.daemon.after(self.daemon.local_latency_s(), self.daemon.connection_ended, self)
        self.process.after(self.daemon.local_latency_s(), self.process.connection_ended, self)


class Daemon(Actor, SimNode):
    """One life of a node's daemon."""

    def __init__(self, world: World, node_name: str, era: int, settings: Settings) -> None:
        Actor.__init__(self, world.agenda, f"{node_name}.{era}")
        self.world = world
        self.node_name = node_name
        self.endpoint = endpoint_of(node_name)
        self.rng = random.Random(world.agenda.rng.random())
        node = Node(
            boot=BootId(f"boot-{node_name}-{era}"),
            endpoint=self.endpoint,
            settings=settings,
            new_token=lambda: self.rng.randbytes(16).hex(),
        )
        SimNode.__init__(self, node, self, world.integrity_every)
        self.clock = world.clocks[node_name]
        self.connections: dict[SessionId, Connection] = {}
        self.movers: dict[MoverId, Mover] = {}
        self.pool = SimulatedPool(
            self,
            random.Random(self.rng.random()),
            size=1,
            mover_ids=iter(self._take_number, None),
            on_exit=self._mover_died,
        )
        self.saved: tuple = ()
        self.has_descriptors = True
        self._granted: set[GrantId] = set()
        self._next_number = 1

    def local_latency_s(self) -> float:
        """Return how long a message between two processes of this node takes."""
        return self.rng.choice((0.00005, 0.0001, 0.0002, 0.001))

    # --- its life

    def start(self, saved: tuple) -> None:
        """Load what an earlier daemon has saved."""
        self.saved = saved
        self.pool.start()
        self.feed(ev.OwnershipsLoaded(saved))

    def die(self) -> None:
        """SIGKILL: connections end, and movers go when they notice."""
        self.note("dies")
        self.is_alive = False
        for connection in self.connections.values():
            connection.close_from_daemon()
        if self.pool.forkserver is not None:  # it reads the end of its socket, unless it is stopped
            self.pool.forkserver.after(self.rng.choice((0.0002, 0.002, 0.3)), self.pool.forkserver.end)
        for mover in self.movers.values():
            delay_s = self.rng.choice((0.0002, 0.002, 0.3, 2.5))
            if self.rng.random() < 0.5:  # it notices nothing while its library hangs in a read
                delay_s = max(delay_s, mover.transport.stalls_until - self.agenda.now + 0.01)
            mover.after(delay_s, mover.die, "its daemon is gone")

    def connect(self, process: Process) -> Connection:
        """Accept a connection."""
        session = SessionId(self._take_number())
        connection = Connection(self, process, session)
        self.connections[session] = connection
        self.after(self.local_latency_s(), self.feed, ev.WorkerConnected(session, 1, 0))
        connection.up.delay(0.001)
        return connection

    def _take_number(self) -> int:
        number, self._next_number = self._next_number, self._next_number + 1
        return number

    # --- events

    def handle_worker_message(
        self, connection: Connection, message: wk.ClientMessage, memory: Buffer | None
    ) -> None:
        """Handle a frame, unless the connection was cut before it was read."""
        if not connection.is_open and connection.session not in self.connections:
            return
        if memory is not None and not self.has_descriptors:  # the frame was cut off: it cannot be read
            text = "cannot take a frame whose descriptors were cut off"
            connection.down.send(
                connection.process.receive, connection, wk.Farewell(Code.BAD_FRAME, text), None, None
            )
            self.end_connection(connection)
            return
        word = b""
        if isinstance(message, wk.Publish) and connection.page is not None:
            word = connection.page.read(message.fence_slot)
        if isinstance(message, wk.Register | wk.Resume):
            connection.offered = memory
        self.feed(ev.WorkerMessage(connection.session, message, None, word))

    def end_connection(self, connection: Connection) -> None:
        """Close a worker's connection."""
        connection.close_from_daemon()
        self.connection_ended(connection)

    def connection_ended(self, connection: Connection) -> None:
        """Handle the end of a worker's connection."""
        if connection.session in self.connections:
            connection.is_open = False
            session = self.node.sessions.get(connection.session)
            rank = session.rank if session is not None else None
            self.feed(ev.WorkerDisconnected(connection.session))  # which still overwrites fence words
            del self.connections[connection.session]
            if rank is not None:
                check_ended(self, rank.spec.key)

    def handle_mover_message(self, mover: Mover, message: mv.FromMover) -> None:
        """Handle a mover's message."""
        self.feed(ev.MoverMessage(mover.mover_id, message))

    def _mover_died(self, mover: MoverId) -> None:
        """Handle a mover's death, after its last message."""
        self.movers.pop(mover, None)
        self.feed(ev.MoverDied(mover))

    def feed(self, event: ev.Event) -> None:
        """Feed the core, and carry out what it wants."""
        super().feed(event)
        self._granted = check_new_grants(self, self._granted)

    def now(self) -> float:
        return self.clock.now()

    def when(self, deadline: float) -> float:
        return self.clock.when(deadline)

    def clock_jumped(self) -> None:
        """Look again when the next timer is due."""
        self._run(self.set_timer, ())

    # --- effects

    def send_to_worker(self, effect: fx.SendToWorker) -> None:
        connection = self.connections.get(effect.session)
        if connection is None or not connection.is_open:
            return
        page = connection.page if effect.with_fence_page else None
        mover = None
        if effect.pidfd_of is not None:
            mover = self.movers.get(effect.pidfd_of)
            if mover is None or not self.has_descriptors:
                self.feed_soon(ev.PidfdNotSent(effect.session, effect.pidfd_of))
                return
        connection.told.check(effect.message)
        if isinstance(effect.message, wk.Released):
            check_word(connection, effect.message)
        connection.down.send(connection.process.receive, connection, effect.message, page, mover)

    def close_worker(self, session: SessionId) -> None:
        if connection := self.connections.get(session):
            connection.close_from_daemon()
            self.after(0.0, self.connection_ended, connection)

    def commit_region_fds(self, session: SessionId) -> None:
        connection = self.connections[session]
        connection.memory = connection.offered

    def create_fence_page(self, session: SessionId) -> None:
        if (connection := self.connections.get(session)) and connection.page is None:
            connection.page = FencePage(f"{self.name}/page{session}", self.rng)

    def overwrite_fence_word(self, session: SessionId, slot: int) -> None:
        if (connection := self.connections.get(session)) and connection.page is not None:
            connection.page.overwrite(slot)

    def request_mover(self, session: SessionId) -> None:
        self.after(0.0, self._request_mover, session)

    def kill_mover(self, mover: MoverId) -> None:
        if handle := self.pool.handles.get(mover):
            handle.process.kill()

    def send_to_mover(self, mover: MoverId, message: Message) -> None:
        if receiver := self.movers.get(mover):
            receiver.from_daemon.send(receiver.handle, message)

    def bind_mover(self, effect: fx.BindMover) -> None:
        mover, connection = self.movers.get(effect.mover), self.connections[effect.session]
        assert connection.memory is not None
        if mover is not None and mover not in connection.process.offered:
            text = f"{mover.name} is to map memory, and {connection.process.name} was not told of it"
            raise Violation("violations", text)
        if mover is not None:
            mover.from_daemon.send(mover.bind, effect.message, connection.memory)

    def share_fence_page(self, mover: MoverId, session: SessionId) -> None:
        page = self.connections[session].page
        assert page is not None
        if receiver := self.movers.get(mover):
            receiver.from_daemon.send(receiver.map_fence, session, page)

    def send_to_peer(self, endpoint: Endpoint, message: Message) -> None:
        self.world.network.request(self, endpoint, message)

    def reply_to_peer(self, route: bytes, message: Message) -> None:
        self.world.network.reply(self, route, message)

    def close_peer_connection(self, endpoint: Endpoint) -> None:
        self.world.network.reconnect(self, endpoint)

    def save_ownerships(self) -> None:
        self.saved = self.node.owners.saved_ranks()

    def _request_mover(self, session: SessionId) -> None:
        self.pool.request(lambda result: self._give_mover(session, result))

    def _give_mover(self, session: SessionId, result: SimulatedHandle | MoverError) -> None:
        if isinstance(result, MoverError):
            self.feed(ev.MoverUnavailable(session, Refusal(result.code, result.message)))
            return
        connection = self.connections.get(session)
        if connection is not None:
            mover = Mover(self, result, connection.process, self.world.fabric)
            self.movers[result.mover_id] = mover
            connection.process.movers[mover] = None
        self.feed(ev.MoverAssigned(session, result.mover_id, result.agent, "simulated"))

    # --- at rest

    def leftovers(self) -> list[str]:
        """Return what a node without work would not remember."""
        node = self.node
        breaker = node.pulls.source_breaker
        kept = {
            "pulls": len(node.pulls),
            "transfers": len(node.published.table.live),
            "grants": len(node.published.table.by_grant),
            "holds": sum(node.grant_client.num_grants().values()),
            "requests": self._num_requests_of_work(),
            "waiting requests": len(node.waiting),
            "refused sources": sum(breaker._left_s(at) > 0 for at in breaker._stalled_at.values()),
            "polled movers": len(node.poll_requests._states),
            "chunks": node.chunk_memory.num_bytes,
            "bytes of parts": node.context.ledger[ARRIVING_ID_BYTES].held,
            "retired movers": node.movers.num_ending(),
            "early readies": sum(
                bool(one.reports)
                for of in node.published.announced._by_engine.values()
                for one in of.values()
            ),
            "fence pages of closed sessions": sum(
                session not in self.connections for m in self.movers.values() for session in m.fences
            ),
            "chunks of movers in use": sum(m.num_chunks_in_use for m in self.movers.values()),
        }
        return [f"{self.name}: {number} {what}" for what, number in kept.items() if number]

    def _num_requests_of_work(self) -> int:
        """Return how many requests are open, without a member's heartbeat that is on its way."""
        context = self.node.context
        begun_after = context.now - context.settings.member_heartbeat_s
        return sum(
            not isinstance(request.message, JoinRank) or request.opened_at < begun_after
            for request in self.node.peer_requests._open.values()
        )


def endpoint_of(node_name: str) -> Endpoint:
    """Return where a node's daemon is reached."""
    return Endpoint(f"tcp://{node_name}:9441")


def message_name(message: Message) -> str:
    """Return a message's kind, for the trace."""
    return type(message).__name__
