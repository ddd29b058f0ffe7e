"""The worker socket: accepts sessions, turns their frames into events, and applies effects to them.

A thin shell: it owns sockets, descriptors and fence pages. It decides who may connect and for how long a
turn, limits what waits for a worker, and checks that a descriptor is of the kind that its message claims.
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
from kvxferd.control.fd_budget import max_memory_fds_of
from kvxferd.control.frame_fds import FrameFds
from kvxferd.control.registration_fds import check_regions, check_registration, detach_mover_socket
from kvxferd.control.round_robin import RoundRobin
from kvxferd.control.session_admission import PartialFrames, SessionAdmission
from kvxferd.control.session_inbox import SessionInbox
from kvxferd.core.events import Event, FdsArrived, WorkerConnected, WorkerDisconnected, WorkerMessage
from kvxferd.core.fair_share import FairShare
from kvxferd.core.limits import RETRY_LATER_S
from kvxferd.errors import Code, ConfigError, EngineError, KvxferdError, ProtocolError
from kvxferd.frame_socket import FrameSocket, close_fds, new_read_buffer
from kvxferd.ids import SessionId
from kvxferd.memory.fence import UnmappedFencePage
from kvxferd.unix_socket import Credentials, credentials_of, is_listening, is_own_uid, open_exit_fds
from kvxferd.wire.codec import CLIENT_MESSAGES, decode_first_frame, encode
from kvxferd.wire.common import FdBatch, Message, Refusal
from kvxferd.wire.fd_batches import FdBatchAssembly
from kvxferd.wire.framing import Frame
from kvxferd.wire.limits import FENCE_SLOTS, MAX_FDS_PER_FRAME, MAX_REGISTER_BYTES
from kvxferd.wire.worker import (
    FIRST_WITH_FENCE_PAGES,
    FIRST_WITH_LATE_FDS,
    Farewell,
    FdsWanted,
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

# 100,000 events of the largest kind. A client with so many unread will not read again.
MAX_QUEUED_BYTES = 32 << 20
# Replies to a hello and to a registration or two: all that a session gets before it is admitted.
MAX_QUEUED_BYTES_UNADMITTED = 64 << 10
BACKLOG = 128
ACCEPT_RETRY_S = 0.2
TURNS_AFTER_EXIT = 64  # of a dead worker: a process forked from it may still send
FAREWELL_S = 0.5  # how long a closed session may take to read why


FD_LIMIT_REFUSAL = Refusal(
    Code.BUSY,
    "cannot take more descriptors: the ranks of this user, or of this node, have all that workers may; "
    "put more memory behind each, raise the daemon's limit of open files, or try again later",
    RETRY_LATER_S,
)


@dataclass(slots=True)
class _Connection:
    """One session's socket, and the descriptors that came over it."""

    session: SessionId
    frame_socket: FrameSocket
    inbox: SessionInbox
    credentials: Credentials
    exit_fd: int  # readable once the worker is dead: a pidfd, or else a pipe
    exit_pipe_writer: int  # if `exit_fd` is a pipe, its other end; else -1
    version: int = 0  # of the protocol, agreed on by hello
    is_hello_done: bool = False
    fence_page: UnmappedFencePage | None = None
    pending_delivery_fd: int | None = None  # of a registration that is not committed; -1: it has none
    delivery_fd: int = -1  # on which movers send Delivered themselves
    is_admitted: bool = False  # its registration or attachment was found valid
    has_memory: bool = False  # it was a registration: more descriptors may follow
    partial_frames: PartialFrames = field(default_factory=PartialFrames)  # kept before it is admitted
    early_fds: FdBatchAssembly = field(default_factory=FdBatchAssembly)
    incomplete_register: Register | None = None  # waits for more descriptors
    num_charged_fds: int = 0  # charged to its user's share
    pending_fds: tuple[int, ...] = ()  # descriptors of the last Register or Resume
    registered_fds: tuple[int, ...] = ()  # of the current registration
    mover_socket: socket.socket | None = None  # to a resident mover, until it is detached
    num_turns_left: int = TURNS_AFTER_EXIT  # left once its worker is dead
    is_worker_dead: bool = False  # the frames that it sent before are being handled
    is_turn_queued: bool = False  # it waits for its next turn, and its socket is not read
    is_writer_watched: bool = False
    is_closing: bool = False  # handles no more frames; queued ones are still sent
    is_ended: bool = False  # the loop no longer watches its socket; released once its events are handled

    def close(self) -> None:
        """Close everything."""
        self.frame_socket.close()
        self.inbox.close()
        self.set_mover_socket(None)
        if self.fence_page is not None:
            self.fence_page.close()
        own = (fd for fd in (self.delivery_fd, self.exit_fd, self.exit_pipe_writer) if fd >= 0)
        self.close_pending()
        close_fds([*self.registered_fds, *own])
        self.registered_fds = ()

    def close_pending(self) -> None:
        """Close the descriptors that do not belong to a committed registration."""
        close_fds([*self.early_fds.pop_all(), *self.pending_fds])
        self.pending_fds, self.incomplete_register = (), None
        self.set_pending_delivery_fd(None)

    def set_pending_delivery_fd(self, fd: int | None) -> None:
        """Keep the delivery socket of an uncommitted registration; -1: it has none; None: no registration."""
        if self.pending_delivery_fd is not None and self.pending_delivery_fd >= 0:
            close_fds([self.pending_delivery_fd])
        self.pending_delivery_fd = fd

    def commit_pending(self) -> None:
        """Make the last descriptors those of the registration."""
        close_fds(self.registered_fds)
        self.registered_fds, self.pending_fds = self.pending_fds, ()
        if self.pending_delivery_fd is not None:
            close_fds([self.delivery_fd] if self.delivery_fd >= 0 else [])
            self.delivery_fd, self.pending_delivery_fd = self.pending_delivery_fd, None
        self.is_admitted = self.has_memory = True

    def set_mover_socket(self, mover: socket.socket | None) -> None:
        """Keep the socket of a resident mover; close an earlier one."""
        if self.mover_socket is not None:
            self.mover_socket.close()
        self.mover_socket = mover


class WorkerSocket:
    """Listens on the socket's path while started. `on_event` gets every event, on the loop's thread."""

    def __init__(
        self,
        config: WorkerConfig,
        on_event: Callable[[Event], None],
        max_sessions: int = 256,
        max_memory_fds: int | None = None,
    ) -> None:
        self._config = config
        self._on_event = on_event
        self._max_sessions = max_sessions
        self._listener: socket.socket | None = None
        self._connections: dict[SessionId, _Connection] = {}
        self._numbers = itertools.count(1)
        if max_memory_fds is None:
            max_memory_fds = max_memory_fds_of(LimitsConfig())
        self._admission = SessionAdmission(max_memory_fds)
        self._round_robin: RoundRobin[_Connection] = RoundRobin(self._process_turn)
        self._read_buffer = new_read_buffer()  # shared by all sessions: 256 buffers would be 64 MiB

    # --- listening

    def start(self) -> None:
        """Listen. Raises ConfigError if the path cannot be bound."""
        path = Path(self._config.socket)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
                raise ConfigError(f"cannot listen on {path}: it is there and is no socket; remove it")
            if is_listening(path):
                raise ConfigError(
                    f"cannot listen on {path}: another daemon does; give this one another worker.socket",
                    Code.ALREADY_RUNNING,
                )
            path.unlink(missing_ok=True)
            # No client can connect between bind and chmod: listen comes after.
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
        self._watch_listener()

    def _watch_listener(self) -> None:
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
            # Out of descriptors: the waiting client would wake the loop again at once, and for ever.
            log.warning("worker accept failed", reason=str(error))
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener.fileno())
            loop.call_later(ACCEPT_RETRY_S, self._watch_listener)
            return
        credentials = credentials_of(accepted)
        link = FrameSocket(accepted, self._read_buffer)
        # No message is larger than the largest registration: block ids come in parts of half that size.
        link.limit_frames(MAX_REGISTER_BYTES, MAX_FDS_PER_FRAME)
        if (farewell := self._rejection(credentials)) is not None:
            link.send(encode(farewell))
            link.flush()
            link.close()
            return
        try:
            death, alive = open_exit_fds(accepted, credentials.pid)
        except OSError as error:
            log.warning("worker connection closed", pid=credentials.pid, reason=str(error))
            link.close()
            return
        session = SessionId(next(self._numbers))
        connection = _Connection(session, link, SessionInbox(link), credentials, death, alive)
        self._connections[session] = connection
        self._on_event(WorkerConnected(session, credentials.pid, credentials.uid))
        loop = asyncio.get_running_loop()
        loop.add_reader(link.fileno(), self._readable, connection)
        if alive < 0:
            loop.add_reader(death, self._on_worker_exit, connection)

    def set_allowed(self, config: WorkerConfig) -> int:
        """Admit these users from now on, and close the sessions of others; return how many were closed."""
        self._config = config
        others = [
            c
            for c in self._connections.values()
            if not (c.is_closing or c.is_ended or self._may_connect(c.credentials))
        ]
        for connection in others:
            text = f"cannot go on as uid {connection.credentials.uid}: its user is no longer allowed"
            self._disconnect(connection, EngineError(text, Code.NOT_ALLOWED))
        return len(others)

    def _may_connect(self, credentials: Credentials) -> bool:
        uids, gids = self._config.allowed_uids, self._config.allowed_gids
        if not uids and not gids:
            return True  # the file's mode has decided
        return is_own_uid(credentials.uid) or credentials.uid in uids or credentials.gid in gids

    def _rejection(self, credentials: Credentials) -> Farewell | None:
        """Return the message to a process that may not register; None if it may."""
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
        if not FairShare.from_counts(self._max_sessions, held_by).has_room(credentials.uid):
            text = (
                f"cannot take another connection of uid {credentials.uid}: "
                f"it has {held_by[credentials.uid]}, and the rest of {self._max_sessions} "
                "(limits.max_sessions) is for users who have few; close some, or try again later"
            )
            return Farewell(code=Code.BUSY, message=text)
        return None

    # --- receiving

    def _readable(self, connection: _Connection) -> None:
        if connection.is_ended or connection.is_worker_dead or self._round_robin.run_now(connection):
            return
        self._schedule_turn(connection, True)

    def _process_turn(self, connection: _Connection) -> float:
        """Handle some of the session's frames; return the processor time."""
        if connection.is_ended:
            return 0.0
        if connection.is_worker_dead:
            self._process_last_frames(connection)
        else:
            self._process_frames(connection)
        return connection.inbox.cpu_s

    def _process_frames(self, connection: _Connection) -> None:
        try:
            has_more = connection.inbox.process_turn(lambda frame: self._handle_frame(connection, frame))
        except ProtocolError as error:
            self._disconnect(connection, error)
            return
        if connection.inbox.is_eof:
            self._end(connection)
        elif not self._charge_partial_frames(connection):
            pass
        elif not connection.is_ended:
            self._schedule_turn(connection, has_more)

    def _charge_partial_frames(self, connection: _Connection) -> bool:
        """Count what is kept for a session that is not admitted. False: too much; the session was ended."""
        if connection.is_ended:
            return False
        kept = (0, 0) if connection.is_admitted else connection.frame_socket.buffered
        try:
            self._admission.charge(connection.credentials.uid, connection.partial_frames, *kept)
        except ProtocolError as error:
            self._disconnect(connection, error)
            return False
        return True

    def _schedule_turn(self, connection: _Connection, has_more: bool) -> None:
        """Queue the session's next turn behind others', or wait until something arrives."""
        loop = asyncio.get_running_loop()
        if has_more:
            self._round_robin.enqueue(connection.credentials.uid, connection)
        if has_more != connection.is_turn_queued:
            connection.is_turn_queued = has_more
            if has_more:
                loop.remove_reader(connection.frame_socket.fileno())
            else:
                loop.add_reader(connection.frame_socket.fileno(), self._readable, connection)

    def _on_worker_exit(self, connection: _Connection) -> None:
        """Handle the worker's death. A process forked from it may hold the socket, but is not the worker."""
        loop = asyncio.get_running_loop()
        connection.is_worker_dead = True
        loop.remove_reader(connection.exit_fd)
        loop.remove_reader(connection.frame_socket.fileno())
        self._round_robin.enqueue(connection.credentials.uid, connection)

    def _process_last_frames(self, connection: _Connection) -> None:
        """Handle what a dead worker had sent, in turns too, then end its session."""
        connection.num_turns_left -= 1
        try:
            connection.inbox.process_turn(lambda frame: self._handle_frame(connection, frame))
        except ProtocolError as error:
            self._disconnect(connection, error)
        if connection.num_turns_left and connection.inbox.num_handled and not connection.inbox.is_eof:
            self._round_robin.enqueue(connection.credentials.uid, connection)
        else:
            self._end(connection)

    def _handle_frame(self, connection: _Connection, frame: Frame) -> None:
        fds = FrameFds(frame.fds)
        try:
            self._handle_message(connection, frame.payload, fds)
        finally:
            fds.close()

    def _handle_message(self, connection: _Connection, payload: bytes, fds: FrameFds) -> None:
        """Handle a message. Descriptors that it keeps are detached from `fds`."""
        if connection.is_closing or connection.is_ended:
            return
        if connection.version:
            message = CLIENT_MESSAGES.decode(payload)
        else:
            message, connection.version = decode_first_frame(payload)
        problem = self._keep_frame_fds(connection, message, fds)
        fds.close()  # before the core handles the message
        word = b""
        if isinstance(message, Publish) and connection.fence_page and 0 <= message.fence_slot < FENCE_SLOTS:
            word = connection.fence_page.read(message.fence_slot)
        awaits_fds = isinstance(message, Register) and connection.incomplete_register is message
        self._on_event(WorkerMessage(connection.session, message, problem, word, awaits_fds))
        if isinstance(message, FdBatch):
            self._complete_registration(connection)

    def _keep_frame_fds(self, connection: _Connection, message: object, fds: FrameFds) -> Refusal | None:
        """Keep the frame's descriptors as the message assigns them; return why they are refused, or None."""
        if isinstance(message, FdBatch):
            self._keep_late_fds(connection, message, fds)
            return None
        if isinstance(message, Register | Resume):
            return self._keep_registration_fds(connection, message, fds)
        if isinstance(message, NewMover):
            if len(fds) != 1:
                raise ProtocolError(
                    f"cannot take a new mover: {len(fds)} descriptors came, not its socket alone"
                )
            try:
                connection.set_mover_socket(detach_mover_socket(fds))
            except EngineError as error:
                raise ProtocolError(error.message) from error
            return None
        if isinstance(message, Hello):
            return self._keep_hello_fds(connection, message, fds)
        if fds:
            raise ProtocolError(f"cannot take descriptors with {type(message).__name__}")
        return None

    def _keep_registration_fds(
        self, connection: _Connection, message: Register | Resume, fds: FrameFds
    ) -> Refusal | None:
        if isinstance(message, Resume):
            connection.set_pending_delivery_fd(None)  # the rank keeps its present ones
        elif connection.incomplete_register is not None:
            # The core has the first registration's regions, but the check would use this one's.
            raise ProtocolError(
                "cannot register again: descriptors of the registration before are still to come",
                Code.OUT_OF_PLACE,
            )
        close_fds(connection.pending_fds)
        connection.pending_fds, connection.incomplete_register = (), None
        if isinstance(message, Register) and connection.version >= FIRST_WITH_LATE_FDS:
            if message.notices and not fds:
                raise ProtocolError("cannot take notices: their socket is the last descriptor of the frame")
            connection.set_pending_delivery_fd(fds.detach_last() if message.notices else -1)
            if message.num_descriptors > len(fds) - (message.placement == "resident"):
                connection.incomplete_register = message
        fds.prepend(connection.early_fds.pop_all())
        mover, problem = check_registration(message, fds, connection.incomplete_register is None)
        connection.set_mover_socket(mover)
        if problem is None and not self._charge_fds(connection, len(fds)):
            problem = FD_LIMIT_REFUSAL
        if problem is not None:
            fds.close()
            connection.incomplete_register = None
            self._charge_fds(connection)
        elif connection.incomplete_register is not None:
            self._add_early_fds(connection, 0, fds)
        else:
            connection.pending_fds = fds.detach_all()
        return problem

    def _keep_late_fds(self, connection: _Connection, part: FdBatch, fds: FrameFds) -> None:
        """Keep descriptors that belong to an admitted registration. An attachment has none."""
        if not connection.has_memory:
            old = connection.version < FIRST_WITH_LATE_FDS
            raise ProtocolError(
                "cannot take descriptors before the registration that they belong to"
                + ("; from version 2 on they come behind it: upgrade the older" if old else ""),
                Code.BAD_VERSION if old else Code.OUT_OF_PLACE,
            )
        self._add_early_fds(connection, part.first, fds)
        if not self._charge_fds(connection):
            raise ProtocolError(FD_LIMIT_REFUSAL.message, Code.BUSY)

    def _add_early_fds(self, connection: _Connection, first: int, fds: FrameFds) -> None:
        surplus_fds = connection.early_fds.add(first, fds.fds)
        fds.detach_all()  # only now `connection` owns them
        close_fds(surplus_fds)

    def _complete_registration(self, connection: _Connection) -> None:
        """Send the registration to the core once all its descriptors have arrived."""
        announced = connection.incomplete_register
        if announced is None or len(connection.early_fds) < announced.num_descriptors:
            return
        connection.incomplete_register = None
        connection.pending_fds = connection.early_fds.pop_all()
        self._on_event(FdsArrived(connection.session, check_regions(announced, connection.pending_fds)))

    def _charge_fds(self, connection: _Connection, num_more: int = 0) -> bool:
        """Count the session's descriptors and `num_more`; return whether its user may have so many."""
        shares, uid = self._admission.memory_fds, connection.credentials.uid
        num_kept = len(connection.early_fds) + num_more
        if connection.incomplete_register is not None:
            num_kept = max(num_kept, connection.incomplete_register.num_descriptors)
        count = num_kept + len(connection.pending_fds) + len(connection.registered_fds)
        shares.add(uid, count - connection.num_charged_fds)
        is_more, connection.num_charged_fds = count > connection.num_charged_fds, count
        return not is_more or shares.has_room(uid, 0)

    def _keep_hello_fds(self, connection: _Connection, message: Hello, fds: FrameFds) -> Refusal | None:
        if connection.is_hello_done or len(fds) != 1 + message.notices:
            raise ProtocolError(
                "cannot take hello: it comes once, with the fence page, and the notices where it has any"
            )
        connection.is_hello_done = True
        if connection.version >= FIRST_WITH_FENCE_PAGES:
            # For a version-1 daemon: this one makes the page, and gets the delivery socket with Register.
            return None
        try:
            connection.fence_page = UnmappedFencePage.from_fd(fds.fds[0])
        except EngineError as error:
            return Refusal(error.code, error.message)
        _, *notices = fds.detach_all()
        connection.delivery_fd = notices[0] if notices else -1
        return None

    def _disconnect(self, connection: _Connection, error: KvxferdError) -> None:
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

    # --- effects

    def send(self, session: SessionId, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Queue a frame, and own `fds`. Close them if the session is gone."""
        connection = self._connections.get(session)
        if connection is None or connection.is_closing or connection.is_ended:
            close_fds(fds)
            return
        if isinstance(message, Suspended):
            # A descriptor keeps memory alive; after this message only the worker may.
            close_fds(connection.registered_fds)
            connection.registered_fds = ()
            self._charge_fds(connection)
        elif isinstance(message, Refused):
            connection.close_pending()
            self._charge_fds(connection)
        elif isinstance(message, Registered):
            connection.is_admitted = True
        elif isinstance(message, FdsWanted):
            connection.is_admitted = connection.has_memory = True
        try:
            connection.frame_socket.send(encode(message), fds)
        except ProtocolError as error:
            # Without this message the client would wait for ever; after a close it connects again.
            log.error(
                "worker message not sent",
                limit_by=f"uid {connection.credentials.uid}",
                session=session,
                reason=error.message,
            )
            self._end(connection)
            return
        connection.frame_socket.flush()
        if connection.frame_socket.queued_bytes > (
            MAX_QUEUED_BYTES if connection.is_admitted else MAX_QUEUED_BYTES_UNADMITTED
        ):
            log.warning(
                "worker send queue full",
                limit_by=f"uid {connection.credentials.uid}",
                session=session,
            )
            self._end(connection)
            return
        self._watch_writable(connection)

    def _watch_writable(self, connection: _Connection) -> None:
        loop = asyncio.get_running_loop()
        if connection.frame_socket.is_flushed == connection.is_writer_watched:
            if connection.is_writer_watched:
                loop.remove_writer(connection.frame_socket.fileno())
            else:
                loop.add_writer(connection.frame_socket.fileno(), self._writable, connection)
            connection.is_writer_watched = not connection.is_writer_watched

    def _writable(self, connection: _Connection) -> None:
        connection.frame_socket.flush()
        if connection.is_ended:
            return
        self._watch_writable(connection)
        if connection.is_closing and connection.frame_socket.is_flushed:
            self._end(connection)

    def close(self, session: SessionId) -> None:
        """Send queued frames, then close: at once if there are none, else within `FAREWELL_S`."""
        connection = self._connections.get(session)
        if connection is None or connection.is_closing or connection.is_ended:
            return
        connection.is_closing = True
        if connection.frame_socket.is_flushed:
            self._end(connection)
        else:
            asyncio.get_running_loop().call_later(FAREWELL_S, self._end, connection)

    def _end(self, connection: _Connection) -> None:
        if connection.is_ended:
            return
        connection.is_ended = True
        loop = asyncio.get_running_loop()
        loop.remove_reader(connection.frame_socket.fileno())
        if connection.exit_pipe_writer < 0:
            loop.remove_reader(connection.exit_fd)
        if connection.is_writer_watched:
            loop.remove_writer(connection.frame_socket.fileno())
        self._on_event(WorkerDisconnected(connection.session))
        # On that event the core has the session's fence words overwritten. It may be queued behind the
        # event that is being handled, so the page stays open until the loop's next turn.
        loop.call_soon(self._release, connection)

    def _release(self, connection: _Connection) -> None:
        del self._connections[connection.session]
        connection.close()
        self._charge_fds(connection)
        self._admission.charge(connection.credentials.uid, connection.partial_frames, 0, 0)

    def commit_region_fds(self, session: SessionId) -> None:
        """Make the last descriptors those of the session's registration."""
        if connection := self._connections.get(session):
            connection.commit_pending()
            self._charge_fds(connection)

    def detach_mover(self, session: SessionId) -> tuple[socket.socket, tuple[int, int]] | None:
        """Return a resident mover's socket, and its worker's pid and exit fd (-1: none).

        The caller owns both descriptors. None if no socket came.
        """
        connection = self._connections.get(session)
        if connection is None or connection.mover_socket is None:
            return None
        # A pipe instead of a pidfd does not prove the death: it ends with the session.
        death = os.dup(connection.exit_fd) if connection.exit_pipe_writer < 0 else -1
        mover, connection.mover_socket = connection.mover_socket, None
        return mover, (connection.credentials.pid, death)

    def make_fence_page(self, session: SessionId) -> None:
        """Create the session's fence page, unless it has one. If that fails, close the session."""
        connection = self._connections.get(session)
        if connection is None or connection.fence_page is not None:
            return
        try:
            connection.fence_page = UnmappedFencePage.create()
        except OSError as error:
            text = f"cannot make a fence page: {error.strerror}; try again later"
            self._disconnect(connection, KvxferdError(text, Code.BUSY))

    def send_with_fence_page(self, session: SessionId, message: Message) -> None:
        """Queue a frame with the descriptor of the session's fence page. If that fails, close the session."""
        connection = self._connections.get(session)
        if connection is None or connection.fence_page is None:
            return  # its page could not be created, so it is being closed
        try:
            page = os.dup(connection.fence_page.fd)
        except OSError as error:
            text = f"cannot hand out a fence page: {error.strerror}; try again later"
            self._disconnect(connection, KvxferdError(text, Code.BUSY))
            return
        self.send(session, message, (page,))

    def overwrite_fence_word(self, session: SessionId, slot: int) -> None:
        """Overwrite a fence word, now. A session whose page cannot be written is closed."""
        connection = self._connections.get(session)
        if connection is None or connection.fence_page is None:
            return
        try:
            connection.fence_page.overwrite(slot)
        except OSError as error:
            log.warning("fence page not written", session=session, reason=str(error))
            self._end(connection)

    def bind_fds(self, session: SessionId) -> tuple[int, ...]:
        """Return copies of what Bind carries: the regions' fds, the delivery socket if any, the exit fd."""
        connection = self._connections.get(session)
        if connection is None:
            return ()
        notices = (connection.delivery_fd,) if connection.delivery_fd >= 0 else ()
        return (*connection.registered_fds, *notices, connection.exit_fd)

    def is_worker_alive(self, session: SessionId) -> bool:
        """Whether the session is open and its worker is not known to be dead."""
        connection = self._connections.get(session)
        if connection is None or connection.is_worker_dead:
            return False
        watch = select.poll()
        watch.register(connection.exit_fd, select.POLLIN)
        return not watch.poll(0)

    def fence_page_fd(self, session: SessionId) -> int:
        """Return the descriptor of the session's fence page; -1 if the session is gone."""
        connection = self._connections.get(session)
        return (
            connection.fence_page.fd if connection is not None and connection.fence_page is not None else -1
        )
