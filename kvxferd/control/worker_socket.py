"""The worker socket: accepts sessions, turns their frames into events, and applies effects to them.

A thin shell: it owns sockets and fence pages, handles frames in turns, and limits what waits for a worker.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import structlog

from kvxferd.config import WorkerConfig
from kvxferd.control.session_fds import SessionFds
from kvxferd.control.turns import MESSAGES_PER_TURN, Turns
from kvxferd.control.worker_connection import WorkerConnection
from kvxferd.core.events import Event, WorkerConnected, WorkerDisconnected, WorkerMessage
from kvxferd.core.limits.ledger import FairShare, Share
from kvxferd.core.limits.table import SESSIONS
from kvxferd.errors import BusyError, Code, EngineError, KvxferdError, ProtocolError, count_busy_refusal
from kvxferd.frame_socket import close_fds, new_read_buffer
from kvxferd.frame_stream import FrameStream
from kvxferd.ids import SessionId
from kvxferd.unix_socket import Credentials, bind_unix_socket, credentials_of, is_own_uid, open_exit_fds
from kvxferd.wire.codec import CLIENT_MESSAGES, decode_first_frame, encode
from kvxferd.wire.common import FdBatch, Message
from kvxferd.wire.framing import Frame
from kvxferd.wire.limits import FENCE_SLOTS, MAX_FDS_PER_FRAME, MAX_REGISTER_BYTES
from kvxferd.wire.worker import Farewell, FdsRequest, Publish, Refused, Register, Registered, Suspended

log = structlog.get_logger()

# 45,000 events of the largest kind. A client with so many unread will not read again.
MAX_QUEUED_BYTES = 32 << 20
# Replies to a hello and to a registration or two: all that a session gets before it is admitted.
MAX_QUEUED_BYTES_UNADMITTED = 64 << 10
# Of sessions that are not admitted: their registration or attachment was not found valid yet, and they only
# have the socket's path. A `register` of 150 KiB arrives whole, so nearly nothing of it is ever kept; 32
# sessions that each stop in the middle of the largest one are 32 MiB.
MAX_PARTIAL_BYTES = 32 << 20
# Descriptors of frames that are not complete or not handled yet: four full frames.
MAX_PARTIAL_FDS = 4 * MAX_FDS_PER_FRAME
BACKLOG = 128
ACCEPT_RETRY_S = 0.2
FAREWELL_S = 0.5  # how long a closed session may take to read why


class WorkerSocket:
    """Listens on the socket's path while started. `on_event` gets every event, on the loop's thread."""

    def __init__(
        self,
        config: WorkerConfig,
        on_event: Callable[[Event], None],
        max_sessions: int,
        max_memory_fds: int,
        turns: Turns,
    ) -> None:
        """`turns`: shared with the peers' sockets."""
        self._config = config
        self._on_event = on_event
        self._sessions = Share(SESSIONS, max_sessions)
        self._listener: socket.socket | None = None
        self._connections: dict[SessionId, WorkerConnection] = {}
        self._numbers = itertools.count(1)
        self._fds = SessionFds(max_memory_fds)
        self._partial_bytes = FairShare(MAX_PARTIAL_BYTES)
        self._partial_fds = FairShare(MAX_PARTIAL_FDS)
        self._turns = turns
        self._read_buffer = new_read_buffer()  # shared by all sessions: 256 buffers would be 64 MiB

    # --- listening

    def start(self) -> None:
        """Listen. Raises ConfigError if the path cannot be bound."""
        path = Path(self._config.socket)
        listener = bind_unix_socket(path, self._config.mode, "worker.socket")
        listener.listen(BACKLOG)
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
        stream = FrameStream(
            accepted,
            lambda: self._readable(connection),
            lambda reason: self._on_stream_end(connection, reason),
            MAX_QUEUED_BYTES_UNADMITTED,
            self._read_buffer,
        )
        # No message is larger than the largest registration: block ids come in parts of half that size.
        stream.limit_frames(MAX_REGISTER_BYTES, MAX_FDS_PER_FRAME)
        if (farewell := self._rejection(credentials)) is not None:
            stream.send(encode(farewell))
            stream.close()
            return
        try:
            death, alive = open_exit_fds(accepted, credentials.pid)
        except OSError as error:
            log.warning("worker connection closed", pid=credentials.pid, reason=str(error))
            stream.close()
            return
        session = SessionId(next(self._numbers))
        connection = WorkerConnection(session, stream, credentials, death, alive)
        self._connections[session] = connection
        self._sessions.add(credentials.uid, 1)
        self._on_event(WorkerConnected(session, credentials.pid, credentials.uid))
        stream.set_reading()
        if alive < 0:
            asyncio.get_running_loop().add_reader(death, self._on_worker_exit, connection)

    def _may_connect(self, credentials: Credentials) -> bool:
        """Whether the process's user or group is allowed."""
        uids, gids = self._config.allowed_uids, self._config.allowed_gids
        if not uids and not gids:
            return True  # the file's mode has decided
        return is_own_uid(credentials.uid) or credentials.uid in uids or credentials.gid in gids

    def _rejection(self, credentials: Credentials) -> Farewell | None:
        """Return the message to a process that may not register; None if it may."""
        uid = credentials.uid
        if not self._may_connect(credentials):
            text = (
                f"cannot use this socket as uid {uid}, gid {credentials.gid}: "
                "add one of them to worker.allowed_uids or worker.allowed_gids"
            )
            return Farewell(code=Code.NOT_ALLOWED, message=text)
        try:
            self._sessions.check(uid, 1, "take another connection")
        except BusyError as error:
            return Farewell(code=error.code, message=error.message)
        return None

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

    # --- receiving

    def _readable(self, connection: WorkerConnection) -> None:
        if connection.is_ended or connection.is_worker_dead:
            return
        if not self._turns.run_now(connection.credentials.uid, partial(self._turn, connection)):
            connection.stream.set_reading(False)

    def _turn(self, connection: WorkerConnection) -> bool:
        """Handle some of the session's frames; return whether there may be more."""
        if connection.is_ended:
            return False
        if connection.is_worker_dead:
            return self._process_last_frames(connection)
        return self._process_frames(connection)

    def _process_frames(self, connection: WorkerConnection) -> bool:
        try:
            num_handled = self._handle_some(connection)
        except ProtocolError as error:
            self._disconnect(connection, error)
            return False
        if num_handled is None:
            self._end(connection)
        elif self._charge_partial_frames(connection):
            has_more = connection.stream.has_buffered_frames
            connection.stream.set_reading(not has_more)
            return has_more
        return False

    def _handle_some(self, connection: WorkerConnection) -> int | None:
        """Handle frames for one turn; return how many, None at the end. Raises ProtocolError."""
        return connection.stream.handle_frames(
            partial(self._handle_frame, connection), MESSAGES_PER_TURN, self._turns.is_over
        )

    def _charge_partial_frames(self, connection: WorkerConnection) -> bool:
        """Count what is kept for a session that is not admitted. False: too much; the session was ended."""
        if connection.is_ended:
            return False
        num_bytes, num_fds = (0, 0) if connection.is_admitted else connection.stream.buffered
        has_room = connection.charge(self._partial_bytes, "partial bytes", num_bytes)
        if connection.charge(self._partial_fds, "partial descriptors", num_fds) and has_room:
            return True
        count_busy_refusal("unfinished_registrations")
        text = (
            "cannot take more of what has arrived: too many registrations of this user have begun and are "
            "not whole; try again later"
        )
        self._disconnect(connection, ProtocolError(text, Code.BUSY))
        return False

    def _on_worker_exit(self, connection: WorkerConnection) -> None:
        """Handle the worker's death. A process forked from it may hold the socket, but is not the worker."""
        connection.is_worker_dead = True
        asyncio.get_running_loop().remove_reader(connection.exit_fd)
        connection.stream.set_reading(False)
        self._turns.enqueue(connection.credentials.uid, partial(self._turn, connection))

    def _process_last_frames(self, connection: WorkerConnection) -> bool:
        """Handle what a dead worker had sent, in turns too, then end its session."""
        connection.num_turns_left -= 1
        num_handled = None
        try:
            num_handled = self._handle_some(connection)
        except ProtocolError as error:
            self._disconnect(connection, error)
        if connection.num_turns_left and num_handled:
            return True
        self._end(connection)
        return False

    def _handle_frame(self, connection: WorkerConnection, frame: Frame) -> None:
        fds = list(frame.fds)  # those that no session owns yet
        try:
            if connection.is_closing or connection.is_ended:
                return
            if connection.has_first_frame:
                message = CLIENT_MESSAGES.decode(frame.payload)
            else:
                message = decode_first_frame(frame.payload)
                connection.has_first_frame = True
            problem = self._fds.assign(connection, message, fds)
        finally:
            close_fds(fds)  # before the core handles the message
        word = b""
        if isinstance(message, Publish) and connection.fence_page and 0 <= message.fence_slot < FENCE_SLOTS:
            word = connection.fence_page.read(message.fence_slot)
        awaits_fds = isinstance(message, Register) and connection.incomplete_register is message
        self._on_event(WorkerMessage(connection.session, message, problem, word, awaits_fds))
        if isinstance(message, FdBatch) and (arrived := self._fds.complete_registration(connection)):
            self._on_event(arrived)

    def _disconnect(self, connection: WorkerConnection, error: KvxferdError) -> None:
        self.end_session(connection.session, Farewell(code=error.code, message=error.message))

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
            self._fds.charge(connection)
        elif isinstance(message, Refused):
            connection.close_pending()
            self._fds.charge(connection)
        elif isinstance(message, Registered):
            connection.is_admitted = True
        elif isinstance(message, FdsRequest):
            connection.is_admitted = connection.has_memory = True
        if connection.is_admitted:
            connection.stream.max_unsent = MAX_QUEUED_BYTES
        try:
            connection.stream.send(encode(message), fds)
        except ProtocolError as error:
            # Without this message the client would wait for ever; after a close it connects again.
            log.error(
                "worker message not sent",
                limit_by=f"uid {connection.credentials.uid}",
                session=session,
                reason=error.message,
            )
            self._end(connection)

    def _on_stream_end(self, connection: WorkerConnection, reason: str) -> None:
        if reason:
            limit_by = f"uid {connection.credentials.uid}"
            log.warning("worker send queue full", limit_by=limit_by, session=connection.session)
        self._end(connection)

    def end_session(self, session: SessionId, farewell: Farewell) -> None:
        """Send queued frames and the farewell, then close, after `FAREWELL_S` at the latest."""
        connection = self._connections.get(session)
        if connection is None or connection.is_closing or connection.is_ended:
            return
        log.warning(
            "worker session closed",
            limit_by=f"uid {connection.credentials.uid}",
            session=session,
            pid=connection.credentials.pid,
            code=farewell.code,
            reason=farewell.message,
        )
        self.send(session, farewell)
        connection.is_closing = True
        connection.stream.end_when_flushed(FAREWELL_S)

    def _end(self, connection: WorkerConnection) -> None:
        if connection.is_ended:
            return
        connection.is_ended = True
        loop = asyncio.get_running_loop()
        connection.stream.detach()
        if connection.exit_pipe_writer < 0:
            loop.remove_reader(connection.exit_fd)
        self._on_event(WorkerDisconnected(connection.session))
        # On that event the core has the session's fence words overwritten. It may be queued behind the
        # event that is being handled, so the page stays open until the loop's next turn.
        loop.call_soon(self._release, connection)

    def _release(self, connection: WorkerConnection) -> None:
        del self._connections[connection.session]
        self._sessions.release(connection.credentials.uid)
        connection.close()
        self._fds.charge(connection)
        connection.charge(self._partial_bytes, "partial bytes", 0)
        connection.charge(self._partial_fds, "partial descriptors", 0)

    def commit_region_fds(self, session: SessionId) -> None:
        """Make the last descriptors those of the session's registration."""
        if connection := self._connections.get(session):
            connection.commit_pending()
            self._fds.charge(connection)

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

    def send_with_fence_page(self, session: SessionId, message: Message) -> None:
        """Queue a frame with the descriptor of the session's fence page. If that fails, close the session."""
        connection = self._connections.get(session)
        if connection is None:
            return
        try:
            page = os.dup(connection.page().fd)
        except OSError as error:
            text = f"cannot hand out a fence page: {error.strerror}; try again later"
            count_busy_refusal("open_files")
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
        """Return what Bind carries: the regions' fds, the delivery socket and the exit fd."""
        connection = self._connections.get(session)
        if connection is None:
            return ()
        return (*connection.registered_fds, connection.delivery_fd, connection.exit_fd)

    def is_worker_alive(self, session: SessionId) -> bool:
        """Whether the session is open and its worker is not known to be dead."""
        connection = self._connections.get(session)
        if connection is None or connection.is_worker_dead:
            return False
        watch = select.poll()
        watch.register(connection.exit_fd, select.POLLIN)
        return not watch.poll(0)

    def fence_page_fd(self, session: SessionId) -> int:
        """Return the descriptor of the session's fence page; -1 if the session is gone. Raises OSError."""
        connection = self._connections.get(session)
        return connection.page().fd if connection is not None else -1
