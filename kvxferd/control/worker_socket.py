"""The worker socket: accepts sessions, turns their frames into events, and does effects on them.

A thin shell: it owns sockets, descriptors and fence pages, and decides nothing but whether
a descriptor is what it claims to be.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import socket
import stat
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from kvxferd.config import LimitsConfig, WorkerConfig
from kvxferd.control.admission import Admission, Waiting
from kvxferd.control.callers import Credentials, credentials_of, death_watch
from kvxferd.control.descriptor_budget import memory_descriptors
from kvxferd.control.frame_descriptors import FrameDescriptors
from kvxferd.control.inbox import Inbox
from kvxferd.control.offers import check_offer, mover_socket, take_offer
from kvxferd.control.turns import Turns
from kvxferd.core.events import DescriptorsCame, Event, WorkerClosed, WorkerOpened, WorkerSaid
from kvxferd.core.limits import RETRY_LATER_S
from kvxferd.core.shares import Shares
from kvxferd.errors import Code, ConfigError, EngineError, KvxferdError, ProtocolError
from kvxferd.ids import SessionId
from kvxferd.link import Link, close_all, new_room
from kvxferd.memory.fence import UnmappedFencePage
from kvxferd.old_places import is_answered
from kvxferd.wire.codec import CLIENT_MESSAGES, decode_first, encode
from kvxferd.wire.common import Descriptors, Message, Refusal
from kvxferd.wire.descriptors import EarlyDescriptors
from kvxferd.wire.framing import Frame
from kvxferd.wire.limits import FENCE_SLOTS, MAX_FDS_PER_FRAME, MAX_REGISTER_BYTES
from kvxferd.wire.worker import (
    FIRST_WITH_FENCE_PAGES,
    FIRST_WITH_LATE_DESCRIPTORS,
    DescriptorsWanted,
    Farewell,
    Hello,
    NewMover,
    Publish,
    Refused,
    Register,
    Registered,
    Resume,
    Suspended,
)

log = structlog.get_logger()

# 100,000 events of the largest kind. A client that reads nothing for so long is not coming back.
MAX_QUEUED_BYTES = 32 << 20
# Answers to a hello and to a registration or two, which are all that a session gets before it is admitted.
MAX_QUEUED_BEFORE = 64 << 10
BACKLOG = 128
ACCEPT_AGAIN_S = 0.2
LAST_TURNS = 64  # of a dead worker: a process forked from it may go on sending
FAREWELL_S = 0.5  # how long a closed session may take to read why


NO_DESCRIPTORS = Refusal(
    Code.BUSY,
    "cannot take more descriptors: the ranks of this user, or of this node, have all that workers may; "
    "put more memory behind each, raise the daemon's limit of open files, or try again later",
    RETRY_LATER_S,
)


@dataclass(slots=True)
class _Connection:
    """One session's socket and all that came over it."""

    session: SessionId
    link: Link
    inbox: Inbox
    credentials: Credentials
    death: int  # readable once the worker is dead: a pidfd where there is one
    alive: int  # where `death` is a pipe, its other end; else -1
    version: int = 0  # of the protocol, agreed on by hello
    greeted: bool = False
    fence: UnmappedFencePage | None = None
    offered_notices: int | None = None  # of a registration that is not adopted; -1: it has none
    notices: int = -1  # where movers say Delivered themselves
    admitted: bool = False  # its registration, or attachment, was found right
    has_memory: bool = False  # it was a registration: descriptors may come by themselves
    waiting: Waiting = field(default_factory=Waiting)  # what it keeps before
    early: EarlyDescriptors = field(default_factory=EarlyDescriptors)
    announced: Register | None = None  # has more descriptors than came with it
    num_counted: int = 0  # descriptors that its user's share is charged with
    offered: tuple[int, ...] = ()  # descriptors of the last Register or Resume
    adopted: tuple[int, ...] = ()  # those of the present registration
    mover: socket.socket | None = None  # to a resident mover that nobody has taken yet
    num_last_turns: int = LAST_TURNS  # that are left once its worker is dead
    is_dead: bool = False  # its worker is, and what it had sent is being taken
    has_more: bool = False  # it waits for its next turn, and its socket is not read
    writing: bool = False
    closing: bool = False  # takes no more frames; what is queued still goes out
    ended: bool = False  # its socket is out of the loop; it is released when its events are dealt with

    def release(self) -> None:
        """Close everything."""
        self.link.close()
        self.inbox.close()
        self.bring(None)
        if self.fence is not None:
            self.fence.close()
        own = (fd for fd in (self.notices, self.death, self.alive) if fd >= 0)
        self.drop_offered()
        close_all([*self.adopted, *own])
        self.adopted = ()

    def drop_offered(self) -> None:
        """Close what no registration has."""
        close_all([*self.early.take(), *self.offered])
        self.offered, self.announced = (), None
        self.offer_notices(None)

    def offer_notices(self, fd: int | None) -> None:
        """Keep the socket of a registration that is not adopted; -1: it has none, None: there is none."""
        if self.offered_notices is not None and self.offered_notices >= 0:
            close_all([self.offered_notices])
        self.offered_notices = fd

    def adopt(self) -> None:
        """What came last is the registration's."""
        close_all(self.adopted)
        self.adopted, self.offered = self.offered, ()
        if self.offered_notices is not None:
            close_all([self.notices] if self.notices >= 0 else [])
            self.notices, self.offered_notices = self.offered_notices, None
        self.admitted = self.has_memory = True

    def bring(self, mover: socket.socket | None) -> None:
        """Keep the socket of a resident mover, the last that came."""
        if self.mover is not None:
            self.mover.close()
        self.mover = mover


class WorkerSocket:
    """Listens on the socket's path while started. `on_event` gets every event, on the loop's thread."""

    def __init__(
        self,
        config: WorkerConfig,
        on_event: Callable[[Event], None],
        max_sessions: int = 256,
        max_descriptors: int | None = None,
    ) -> None:
        self._config = config
        self._on_event = on_event
        self._max_sessions = max_sessions
        self._listener: socket.socket | None = None
        self._connections: dict[SessionId, _Connection] = {}
        self._numbers = itertools.count(1)
        most = memory_descriptors(LimitsConfig()) if max_descriptors is None else max_descriptors
        self._admission = Admission(most)
        self._turns: Turns[_Connection] = Turns(self._take_turn)
        self._room = new_room()  # one for all links: 256 of their own would be 64 MiB

    # --- listening

    def start(self) -> None:
        """Listen. Raises ConfigError where the path cannot be had."""
        path = Path(self._config.socket)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
                raise ConfigError(f"cannot listen on {path}: it is there and is no socket; remove it")
            if is_answered(path):
                raise ConfigError(
                    f"cannot listen on {path}: another daemon does; give this one another worker.socket",
                    Code.ALREADY_RUNNING,
                )
            path.unlink(missing_ok=True)
            # Nobody connects between bind and chmod: listen comes after.
            listener.bind(os.fspath(path))
            path.chmod(self._config.mode)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise ConfigError(f"cannot listen on {path}: {error.strerror}") from error
        except ConfigError:
            listener.close()
            raise
        self._listener = listener
        self._listen()

    def _listen(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def stop(self) -> None:
        """Close every session and remove the socket's file."""
        if self._listener is None:
            return
        Path(self._config.socket).unlink(missing_ok=True)
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._listener.close()
        self._listener = None
        for connection in list(self._connections.values()):
            self._end(connection)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # Out of descriptors: whoever waits would wake the loop again at once, and for ever.
            log.warning("worker socket: cannot accept", error=str(error))
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener.fileno())
            loop.call_later(ACCEPT_AGAIN_S, self._listen)
            return
        credentials = credentials_of(accepted)
        link = Link(accepted, self._room)
        # No message is larger than the largest registration: block ids come in parts of half of it.
        link.limit_frames(MAX_REGISTER_BYTES, MAX_FDS_PER_FRAME)
        if (farewell := self._obstacle(credentials)) is not None:
            link.send(encode(farewell))
            link.flush()
            link.close()
            return
        try:
            death, alive = death_watch(accepted, credentials.pid)
        except OSError as error:
            log.warning("worker socket: cannot watch who connects", pid=credentials.pid, error=str(error))
            link.close()
            return
        session = SessionId(next(self._numbers))
        connection = _Connection(session, link, Inbox(link), credentials, death, alive)
        self._connections[session] = connection
        self._on_event(WorkerOpened(session, credentials.pid, credentials.uid))
        loop = asyncio.get_running_loop()
        loop.add_reader(link.fileno(), self._readable, connection)
        if alive < 0:
            loop.add_reader(death, self._died, connection)

    def set_allowed(self, config: WorkerConfig) -> int:
        """Admit these users from now on, and close the sessions of others; return how many."""
        self._config = config
        others = [
            c
            for c in self._connections.values()
            if not (c.closing or c.ended or self._may_connect(c.credentials))
        ]
        for connection in others:
            text = f"cannot go on as uid {connection.credentials.uid}: its user is no longer allowed"
            self._expel(connection, EngineError(text, Code.NOT_ALLOWED))
        return len(others)

    def _may_connect(self, credentials: Credentials) -> bool:
        uids, gids = self._config.allowed_uids, self._config.allowed_gids
        if not uids and not gids:
            return True  # the file's mode has decided
        return credentials.uid in (0, os.geteuid(), *uids) or credentials.gid in gids

    def _obstacle(self, credentials: Credentials) -> Farewell | None:
        """What whoever connects is told before the connection is closed; None if they may stay."""
        if not self._may_connect(credentials):
            text = (
                f"cannot use this socket as uid {credentials.uid}, gid {credentials.gid}: "
                "add one of them to worker.allowed_uids or worker.allowed_gids"
            )
            return Farewell(code=Code.NOT_ALLOWED, message=text)
        if len(self._connections) >= self._max_sessions:
            text = (
                f"cannot take another connection: {self._max_sessions} are open (limits.max_sessions); "
                "close some, or try again later"
            )
            return Farewell(code=Code.BUSY, message=text)
        held_by = Counter(c.credentials.uid for c in self._connections.values())
        if not Shares.of(self._max_sessions, held_by).has_room(credentials.uid):
            text = (
                f"cannot take another connection of uid {credentials.uid}: "
                f"it has {held_by[credentials.uid]}, and the rest of {self._max_sessions} "
                "(limits.max_sessions) is for users who have few; close some, or try again later"
            )
            return Farewell(code=Code.BUSY, message=text)
        return None

    # --- hearing

    def _readable(self, connection: _Connection) -> None:
        if connection.ended or connection.is_dead or self._turns.take_now(connection):
            return
        self._wait_for(connection, True)

    def _take_turn(self, connection: _Connection) -> float:
        """Take some of what the session has sent; return the processor time."""
        if connection.ended:
            return 0.0
        if connection.is_dead:
            self._hear_out(connection)
        else:
            self._hear_some(connection)
        return connection.inbox.took_s

    def _hear_some(self, connection: _Connection) -> None:
        try:
            has_more = connection.inbox.take_turn(lambda frame: self._hear(connection, frame))
        except ProtocolError as error:
            self._expel(connection, error)
            return
        if connection.inbox.ended:
            self._end(connection)
        elif not self._may_keep(connection):
            pass
        elif not connection.ended:
            self._wait_for(connection, has_more)

    def _may_keep(self, connection: _Connection) -> bool:
        """Count what is kept of a session that is not admitted, and end it where that is too much."""
        if connection.ended:
            return False
        kept = (0, 0) if connection.admitted else connection.link.kept
        try:
            self._admission.keep(connection.credentials.uid, connection.waiting, *kept)
        except ProtocolError as error:
            self._expel(connection, error)
            return False
        return True

    def _wait_for(self, connection: _Connection, has_more: bool) -> None:
        """Have the session's next turn come: behind others', or when something arrives."""
        loop = asyncio.get_running_loop()
        if has_more:
            self._turns.wait(connection.credentials.uid, connection)
        if has_more != connection.has_more:
            connection.has_more = has_more
            if has_more:
                loop.remove_reader(connection.link.fileno())
            else:
                loop.add_reader(connection.link.fileno(), self._readable, connection)

    def _died(self, connection: _Connection) -> None:
        """The worker is dead. A process forked from it may hold its socket, and is not the worker."""
        loop = asyncio.get_running_loop()
        connection.is_dead = True
        loop.remove_reader(connection.death)
        loop.remove_reader(connection.link.fileno())
        self._turns.wait(connection.credentials.uid, connection)

    def _hear_out(self, connection: _Connection) -> None:
        """Take what a dead worker had sent, in turns too, then end its session."""
        connection.num_last_turns -= 1
        try:
            connection.inbox.take_turn(lambda frame: self._hear(connection, frame))
        except ProtocolError as error:
            self._expel(connection, error)
        if connection.num_last_turns and connection.inbox.num_taken and not connection.inbox.ended:
            self._turns.wait(connection.credentials.uid, connection)
        else:
            self._end(connection)

    def _hear(self, connection: _Connection, frame: Frame) -> None:
        fds = FrameDescriptors(frame.fds)
        try:
            self._take(connection, frame.payload, fds)
        finally:
            fds.close()

    def _take(self, connection: _Connection, payload: bytes, fds: FrameDescriptors) -> None:
        """Take a message. What it keeps of the descriptors it takes out of `fds`."""
        if connection.closing or connection.ended:
            return
        if connection.version:
            message = CLIENT_MESSAGES.decode(payload)
        else:
            message, connection.version = decode_first(payload)
        problem = self._take_descriptors(connection, message, fds)
        fds.close()  # before anybody acts on the message
        word = b""
        if isinstance(message, Publish) and connection.fence and 0 <= message.fence_slot < FENCE_SLOTS:
            word = connection.fence.read(message.fence_slot)
        lacks = isinstance(message, Register) and connection.announced is message
        self._on_event(WorkerSaid(connection.session, message, problem, word, lacks))
        if isinstance(message, Descriptors):
            self._complete(connection)

    def _take_descriptors(
        self, connection: _Connection, message: object, fds: FrameDescriptors
    ) -> Refusal | None:
        """Keep the frame's descriptors where the message says they belong; say what is wrong with them."""
        if isinstance(message, Descriptors):
            self._take_part(connection, message, fds)
            return None
        if isinstance(message, Register | Resume):
            return self._take_registration(connection, message, fds)
        if isinstance(message, NewMover):
            if len(fds) != 1:
                raise ProtocolError(
                    f"cannot take a new mover: {len(fds)} descriptors came, not its socket alone"
                )
            try:
                connection.bring(mover_socket(fds))
            except EngineError as error:
                raise ProtocolError(error.message) from error
            return None
        if isinstance(message, Hello):
            return self._take_hello(connection, message, fds)
        if fds:
            raise ProtocolError(f"cannot take descriptors with {type(message).__name__}")
        return None

    def _take_registration(
        self, connection: _Connection, message: Register | Resume, fds: FrameDescriptors
    ) -> Refusal | None:
        if isinstance(message, Resume):
            connection.offer_notices(None)  # the rank keeps those that it has
        elif connection.announced is not None:
            # The core has the first one's regions; those of this one would be what is checked.
            raise ProtocolError(
                "cannot register again: descriptors of the registration before are still to come",
                Code.OUT_OF_PLACE,
            )
        close_all(connection.offered)
        connection.offered, connection.announced = (), None
        if isinstance(message, Register) and connection.version >= FIRST_WITH_LATE_DESCRIPTORS:
            if message.notices and not fds:
                raise ProtocolError("cannot take notices: their socket is the last descriptor of the frame")
            connection.offer_notices(fds.take_last() if message.notices else -1)
            if message.num_descriptors > len(fds) - (message.placement == "resident"):
                connection.announced = message
        fds.put_before(connection.early.take())
        mover, problem = take_offer(message, fds, connection.announced is None)
        connection.bring(mover)
        if problem is None and not self._count_descriptors(connection, len(fds)):
            problem = NO_DESCRIPTORS
        if problem is not None:
            fds.close()
            connection.announced = None
            self._count_descriptors(connection)
        elif connection.announced is not None:
            self._keep_part(connection, 0, fds)
        else:
            connection.offered = fds.take()
        return problem

    def _take_part(self, connection: _Connection, part: Descriptors, fds: FrameDescriptors) -> None:
        """Keep descriptors that belong to a registration which was found right. An attachment has none."""
        if not connection.has_memory:
            old = connection.version < FIRST_WITH_LATE_DESCRIPTORS
            raise ProtocolError(
                "cannot take descriptors before the registration that they belong to"
                + ("; from version 2 on they come behind it: upgrade the older" if old else ""),
                Code.BAD_VERSION if old else Code.OUT_OF_PLACE,
            )
        self._keep_part(connection, part.first, fds)
        if not self._count_descriptors(connection):
            raise ProtocolError(NO_DESCRIPTORS.message, Code.BUSY)

    def _keep_part(self, connection: _Connection, first: int, fds: FrameDescriptors) -> None:
        void = connection.early.add(first, fds.fds)
        fds.take()  # they are kept now, and only now
        close_all(void)

    def _complete(self, connection: _Connection) -> None:
        """Have the core know when all descriptors that were announced are there."""
        announced = connection.announced
        if announced is None or len(connection.early) < announced.num_descriptors:
            return
        connection.announced = None
        connection.offered = connection.early.take()
        self._on_event(DescriptorsCame(connection.session, check_offer(announced, connection.offered)))

    def _count_descriptors(self, connection: _Connection, num_more: int = 0) -> bool:
        """Count what the session has now, and is to have; return whether its user may have so many."""
        shares, uid = self._admission.descriptors, connection.credentials.uid
        num_kept = len(connection.early) + num_more
        if connection.announced is not None:
            num_kept = max(num_kept, connection.announced.num_descriptors)
        count = num_kept + len(connection.offered) + len(connection.adopted)
        shares.add(uid, count - connection.num_counted)
        is_more, connection.num_counted = count > connection.num_counted, count
        return not is_more or shares.has_room(uid, 0)

    def _take_hello(self, connection: _Connection, message: Hello, fds: FrameDescriptors) -> Refusal | None:
        if connection.greeted or len(fds) != 1 + message.notices:
            raise ProtocolError(
                "cannot take hello: it comes once, with the fence page, and the notices where it has any"
            )
        connection.greeted = True
        if connection.version >= FIRST_WITH_FENCE_PAGES:
            # For a daemon of version 1: this one makes the page, and takes notices with the registration.
            return None
        try:
            connection.fence = UnmappedFencePage.adopt(fds.fds[0])
        except EngineError as error:
            return Refusal(error.code, error.message)
        _, *notices = fds.take()
        connection.notices = notices[0] if notices else -1
        return None

    def _expel(self, connection: _Connection, error: KvxferdError) -> None:
        log.warning(
            "worker session closed",
            limit_by=f"uid {connection.credentials.uid}",
            session=connection.session,
            pid=connection.credentials.pid,
            code=error.code,
            reason=error.message,
        )
        self.send(connection.session, Farewell(code=error.code, message=error.message))
        self.close(connection.session)

    # --- doing

    def send(self, session: SessionId, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Queue a frame; owns `fds`. A session that is gone gets nothing."""
        connection = self._connections.get(session)
        if connection is None or connection.closing or connection.ended:
            close_all(fds)
            return
        if isinstance(message, Suspended):
            # A descriptor keeps memory alive, and this message says that nobody but the worker does.
            close_all(connection.adopted)
            connection.adopted = ()
            self._count_descriptors(connection)
        elif isinstance(message, Refused):
            connection.drop_offered()
            self._count_descriptors(connection)
        elif isinstance(message, Registered):
            connection.admitted = True
        elif isinstance(message, DescriptorsWanted):
            connection.admitted = connection.has_memory = True
        try:
            connection.link.send(encode(message), fds)
        except ProtocolError as error:
            # Without it the client would wait for ever; without the connection it starts anew.
            log.error(
                "worker session cannot be told: closed",
                limit_by=f"uid {connection.credentials.uid}",
                session=session,
                reason=error.message,
            )
            self._end(connection)
            return
        connection.link.flush()
        if connection.link.queued_bytes > (MAX_QUEUED_BYTES if connection.admitted else MAX_QUEUED_BEFORE):
            log.warning(
                "worker session reads no events: closed",
                limit_by=f"uid {connection.credentials.uid}",
                session=session,
            )
            self._end(connection)
            return
        self._watch_writable(connection)

    def _watch_writable(self, connection: _Connection) -> None:
        loop = asyncio.get_running_loop()
        if connection.link.idle == connection.writing:
            if connection.writing:
                loop.remove_writer(connection.link.fileno())
            else:
                loop.add_writer(connection.link.fileno(), self._writable, connection)
            connection.writing = not connection.writing

    def _writable(self, connection: _Connection) -> None:
        connection.link.flush()
        if connection.ended:
            return
        self._watch_writable(connection)
        if connection.closing and connection.link.idle:
            self._end(connection)

    def close(self, session: SessionId) -> None:
        """Send what is queued, then close; at once where nothing is, and soon in any case."""
        connection = self._connections.get(session)
        if connection is None or connection.closing or connection.ended:
            return
        connection.closing = True
        if connection.link.idle:
            self._end(connection)
        else:
            asyncio.get_running_loop().call_later(FAREWELL_S, self._end, connection)

    def _end(self, connection: _Connection) -> None:
        if connection.ended:
            return
        connection.ended = True
        loop = asyncio.get_running_loop()
        loop.remove_reader(connection.link.fileno())
        if connection.alive < 0:
            loop.remove_reader(connection.death)
        if connection.writing:
            loop.remove_writer(connection.link.fileno())
        self._on_event(WorkerClosed(connection.session))
        # The core has the session's fence words overwritten on that event, which may be queued
        # behind the one that is being dealt with: the page stays mapped until the loop's next turn.
        loop.call_soon(self._release, connection)

    def _release(self, connection: _Connection) -> None:
        del self._connections[connection.session]
        connection.release()
        self._count_descriptors(connection)
        self._admission.keep(connection.credentials.uid, connection.waiting, 0, 0)

    def adopt_regions(self, session: SessionId) -> None:
        """The descriptors that came last are the registration's."""
        if connection := self._connections.get(session):
            connection.adopt()
            self._count_descriptors(connection)

    def take_mover(self, session: SessionId) -> tuple[socket.socket, tuple[int, int]] | None:
        """Return a resident mover's socket, and its worker: the pid, and what is readable once it is dead.

        Both descriptors are the caller's. None where no socket came.
        """
        connection = self._connections.get(session)
        if connection is None or connection.mover is None:
            return None
        # A pipe that stands in for a pidfd proves no death: it ends with the session.
        death = os.dup(connection.death) if connection.alive < 0 else -1
        mover, connection.mover = connection.mover, None
        return mover, (connection.credentials.pid, death)

    def make_fence(self, session: SessionId) -> None:
        """Make the session's fence page, unless it has one. A session that cannot have one is closed."""
        connection = self._connections.get(session)
        if connection is None or connection.fence is not None:
            return
        try:
            connection.fence = UnmappedFencePage.create()
        except OSError as error:
            text = f"cannot make a fence page: {error.strerror}; try again later"
            self._expel(connection, KvxferdError(text, Code.BUSY))

    def send_with_fence(self, session: SessionId, message: Message) -> None:
        """Queue a frame that carries the session's fence page. A session that cannot have it is closed."""
        connection = self._connections.get(session)
        if connection is None or connection.fence is None:
            return  # its page could not be made: it is being closed
        try:
            page = os.dup(connection.fence.fd)
        except OSError as error:
            text = f"cannot hand out a fence page: {error.strerror}; try again later"
            self._expel(connection, KvxferdError(text, Code.BUSY))
            return
        self.send(session, message, (page,))

    def overwrite_fence(self, session: SessionId, slot: int) -> None:
        """Overwrite a fence word, now. Whoever keeps its own page from being written loses its session."""
        connection = self._connections.get(session)
        if connection is None or connection.fence is None:
            return
        try:
            connection.fence.overwrite(slot)
        except OSError as error:
            log.warning(
                "worker session's fence page cannot be written: closed", session=session, error=str(error)
            )
            self._end(connection)

    def region_fds(self, session: SessionId) -> tuple[int, ...]:
        """The registration's descriptors, the notices if there are any, then one for the worker's death."""
        connection = self._connections.get(session)
        if connection is None:
            return ()
        notices = (connection.notices,) if connection.notices >= 0 else ()
        return (*connection.adopted, *notices, connection.death)

    def is_alive(self, session: SessionId) -> bool:
        """Whether the session is open and its worker is not known dead."""
        connection = self._connections.get(session)
        if connection is None or connection.is_dead:
            return False
        watch = select.poll()
        watch.register(connection.death, select.POLLIN)
        return not watch.poll(0)

    def fence_fd(self, session: SessionId) -> int:
        """The descriptor of the session's fence page; -1 for a session that is gone."""
        connection = self._connections.get(session)
        return connection.fence.fd if connection is not None and connection.fence is not None else -1
