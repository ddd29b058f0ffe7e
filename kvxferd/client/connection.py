"""A session's one I/O thread: it connects to the daemon, sends, receives and keeps the deadlines."""

from __future__ import annotations

import errno
import math
import os
import random
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from kvxferd.client.events import Event, EventQueue
from kvxferd.client.fence_slots import FenceSlots
from kvxferd.client.mover_watch import MoverWatch, wait_all_quiesced
from kvxferd.client.session import PERMANENT_REFUSALS, ClientSession
from kvxferd.client.session_requests import SessionState
from kvxferd.errors import Code, EngineError, KvxferdError, ProtocolError
from kvxferd.frame_socket import FrameSocket, close_fds, dup_fds
from kvxferd.ids import Ticket
from kvxferd.memory import FencePage
from kvxferd.wire import worker
from kvxferd.wire.codec import DAEMON_MESSAGES, MOVER_DELIVERIES, encode
from kvxferd.wire.framing import Frame
from kvxferd.wire.limits import FENCE_SLOTS, MAX_DELIVERY_BYTES

# Seconds between attempts to connect: a restarted daemon is found within 2 s, and a missing one
# costs next to nothing. Jittered, so that a node's ranks do not connect all at once.
RECONNECT_S = (0.05, 0.1, 0.2, 0.4, 0.8)
RESIDENT_EXIT_S = 2.0  # a resident mover is gone within milliseconds, or is stuck in its library
# The longest request, in bytes of block ids, that an engine's thread sends itself. The I/O thread sends
# longer ones: encoding 64 KiB of block ids and handing them to the kernel takes as long as waking it.
DIRECT_BYTES = 32 << 10
# Poll once a second for `BUSY_S` after a request, so later requests need not wake this thread: their
# deadlines are later than the next poll.
BUSY_S = 5.0
BUSY_POLL_S = 1.0
MAX_PAUSE_S = 3600.0
# Errors that end by themselves: the daemon is not there yet, or its backlog is full.
_TRANSIENT_ERRNOS = frozenset({errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN, errno.EINTR})
STABLE_S = 2.0  # a connection that lasted this long resets the backoff


class Connection:
    """Owns the thread, the socket, the fence page and every descriptor. `close` releases all of them."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self._resources = ExitStack()
        try:
            self._open(path, name)
        except BaseException:
            self._resources.close()
            raise

    def _open(self, path: Path, name: str) -> None:
        self.lock = threading.Lock()
        self.state_changed = threading.Condition(self.lock)  # the session's state, or a reply came
        self.events = EventQueue()
        self._resources.callback(self.events.close)
        fence = FenceSlots(FENCE_SLOTS)
        self._resources.callback(fence.close)
        self._deliveries = DeliverySocketPair()
        self._resources.callback(self._deliveries.close)
        self._events_epoll = select.epoll()  # readable while there are events or deliveries
        self._resources.callback(self._events_epoll.close)
        for source in (self.events, self._deliveries):
            self._events_epoll.register(source.fileno(), select.EPOLLIN)
        self.session = ClientSession(name, fence, self._deliveries.mover_fd, self.events.put)
        self.connect_error: OSError | None = None  # of the last attempt to connect
        self._selector = selectors.DefaultSelector()
        self._resources.callback(self._selector.close)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._resources.callback(os.close, self._wake_fd)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, self._clear_wake_fd)
        self._mover_watch = MoverWatch(self._selector, self._handle_movers_exited)
        self._socket: FrameSocket | None = None
        self._send_lock = threading.Lock()  # to send on the socket or to close it; acquired after `lock`
        self._wakes_at = 0.0  # when the thread calls `tick` next, without being woken
        self._last_request_at = -math.inf  # when an engine's thread last sent a request
        self._selector_mask = selectors.EVENT_READ
        self._connected_at = 0.0
        self._num_attempts = 0
        self._reconnect_at = 0.0
        self._closing = self._is_shut_down = False
        self._disconnect_reason: tuple[Code, str] | None = None  # why the thread is to end this connection
        self._thread = threading.Thread(target=self._run, name=f"kvxferd-client-{path.name}", daemon=True)
        self._thread.start()

    # --- the engine's threads

    def flush(self) -> None:
        """Send what was queued: here if it is one short request, else by the thread. With the lock held.

        A short request that the engine's own thread sends reaches the daemon before the I/O thread
        would have woken up.
        """
        if self._disconnect_reason is not None or not self._send_lock.acquire(blocking=False):
            self.wake()
            return
        is_done, sock, now = False, self._socket, time.monotonic()
        try:
            if sock is not None and sock.is_flushed:
                message = self.session.pop_short_request(DIRECT_BYTES, now)
                if message is not None:
                    self._last_request_at = now
                    sock.send(encode(message))
                    sock.flush()
                    is_done = sock.is_flushed
        finally:
            self._send_lock.release()
        if not is_done or self.session.next_deadline() < self._wakes_at:
            self.wake()

    def wake(self) -> None:
        """Wake the thread: it calls `tick` and sends what is queued. With the lock held."""
        if not self._closing:
            os.eventfd_write(self._wake_fd, 1)

    def request_disconnect(
        self, code: Code = Code.DAEMON_LOST, why: str = "the client gave the connection up"
    ) -> None:
        """Make the thread end this connection to the daemon. With the lock held."""
        self._disconnect_reason = (code, why)
        self.wake()

    def wait_welcomed(self, timeout_s: float) -> None:
        """Return once a daemon has welcomed the session. Raises KvxferdError. With the lock held."""
        session = self.session

        def is_decided() -> bool:
            is_over = session.close_reason is not None or _is_permanent(self.connect_error)
            return is_over or session.state is SessionState.CONNECTED

        self.state_changed.wait_for(is_decided, timeout_s)
        if session.state is SessionState.CONNECTED:
            return
        self._raise_if_closed()
        where, error = f"cannot reach kvxferd at {self.path}", self.connect_error
        if isinstance(error, PermissionError):
            raise KvxferdError(
                f"{where}: permission denied; join the group that owns the socket", Code.NOT_ALLOWED
            )
        if error is not None and _is_permanent(error):
            raise KvxferdError(f"{where}: {error}", Code.DAEMON_LOST)
        if error is not None:
            raise KvxferdError(
                f"{where} within {timeout_s:g} s: {error.strerror}; start `kvxferd serve` on this node, or "
                "mount the folder of its socket here",
                Code.DAEMON_LOST,
            )
        raise KvxferdError(
            f"{where} within {timeout_s:g} s: it took the connection and does not greet; look at its log",
            Code.DEADLINE,
        )

    def wait_replied(self, what: str, timeout_s: float) -> None:
        """Return once the daemon has accepted the request. With the lock held.

        Raises EngineError as the daemon refused, with its code, message and `retry_after_s`; KvxferdError
        without a reply.
        """
        session, registration = self.session, self.session.registration

        def is_decided() -> bool:
            is_over = session.close_reason is not None or session.state is SessionState.READY
            return is_over or registration.reply_refusal is not None

        self.state_changed.wait_for(is_decided, timeout_s)
        registration.caller_waits = False
        if (refusal := registration.reply_refusal) is not None:
            raise EngineError(refusal.message, refusal.code, retry_after_s=refusal.retry_after_s)
        if session.state is SessionState.READY:
            return
        self._raise_if_closed()
        if session.state is SessionState.DISCONNECTED:
            raise KvxferdError(
                f"cannot {what} within {timeout_s:g} s: the daemon at {self.path} has gone; start it again",
                Code.DAEMON_LOST,
            )
        raise KvxferdError(
            f"cannot {what} within {timeout_s:g} s: the daemon has not answered; look at its log, or wait "
            "longer",
            Code.DEADLINE,
        )

    def _raise_if_closed(self) -> None:
        if (final := self.session.close_reason) is not None:
            raise KvxferdError(final.message, final.code)

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a pull, from any thread."""
        with self.lock:
            self.session.cancel(ticket)
            self.flush()

    @property
    def is_over(self) -> bool:
        """Whether the session has ended, and with it all that makes events."""
        with self.lock:
            is_awaited = self.session.awaits_movers and not self._is_shut_down
            return self.session.close_reason is not None and not is_awaited

    def fileno(self) -> int:
        """Return the descriptor that is readable while there are events; -1 after `close`."""
        return -1 if self._events_epoll.closed else self._events_epoll.fileno()

    def drain_events(self) -> list[Event]:
        """Return and remove all events, oldest first."""
        if self.session.has_live_pulls:
            with self.lock:
                self._receive_deliveries()
        return self.events.drain()

    def _receive_deliveries(self) -> None:
        """Handle what movers have sent, before anything else decides a pull. With the lock held."""
        try:
            for delivered in self._deliveries.receive():
                self.session.handle_delivered_by_mover(delivered)
        except KvxferdError as error:
            self.request_disconnect(error.code, f"a mover sent an invalid message: {error.message}")

    def call_at_close(self, call: Callable[[], None]) -> None:
        """Have this called by `close`, before anything else is released and after the thread's end."""
        with self.lock:
            self._resources.callback(call)

    def close(self) -> None:
        """End the session and release everything. Idempotent; waits for no daemon."""
        with self.lock:
            if not self._closing:
                self._closing = True
                os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        with self.lock:
            self._resources.close()

    # --- the I/O thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._run_once()
            self._shut_down(Code.CANCELLED, "the client was closed")
        except BaseException as error:
            # A bug of the client. The engine must learn of it, and nothing may wait for a dead thread.
            self._shut_down(Code.INTERNAL, f"the client's I/O thread failed: {error!r}")
            raise

    def _run_once(self) -> None:
        now = time.monotonic()
        if (reason := self._disconnect_reason) is not None:
            self._disconnect_reason = None
            self._disconnect(*reason)
        try:
            with self.lock:
                self._receive_deliveries()
                self.session.tick(now)
        except KvxferdError as error:
            self._disconnect(error.code, error.message)
        if self._socket is None and now >= self._reconnect_at and self.session.close_reason is None:
            self._connect(now)
        try:
            self._send()
            for key, _ in self._selector.select(self._select_timeout()):
                key.data()
        except OSError as error:  # no descriptor is left: what waits goes over the next connection
            self._disconnect(Code.DAEMON_LOST, f"cannot go on with this connection: {error.strerror}")

    def _select_timeout(self) -> float | None:
        now = time.monotonic()
        with self.lock:
            earliest = self.session.next_deadline()
            if now < self._last_request_at + BUSY_S:
                earliest = min(earliest, now + BUSY_POLL_S)
            if self._socket is None and self.session.close_reason is None:
                earliest = min(earliest, self._reconnect_at)
            self._wakes_at = earliest
        # Selectors count milliseconds in an int: a lease of years would overflow it.
        return None if earliest == math.inf else min(max(0.0, earliest - now), MAX_PAUSE_S)

    def _clear_wake_fd(self) -> None:
        os.eventfd_read(self._wake_fd)

    def _connect(self, now: float) -> None:
        try:
            self._socket = FrameSocket(_connect_unix(self.path))
        except OSError as error:
            with self.lock:
                self.connect_error = error
                self.state_changed.notify_all()
            self._schedule_reconnect(now)
            return
        self._connected_at = now
        self._selector_mask = selectors.EVENT_READ
        self._selector.register(self._socket, self._selector_mask, self._receive)
        with self.lock:
            self.connect_error = None
            self.session.connection_made(now)

    def _schedule_reconnect(self, now: float) -> None:
        step = RECONNECT_S[min(self._num_attempts, len(RECONNECT_S) - 1)]
        self._num_attempts += 1
        self._reconnect_at = now + step * random.uniform(0.8, 1.2)

    def _send(self) -> None:
        sock = self._socket
        if sock is None:
            return
        while not self._send_one(sock):
            pass
        mask = selectors.EVENT_READ | (0 if sock.is_flushed else selectors.EVENT_WRITE)
        if mask != self._selector_mask:
            self._selector_mask = mask
            self._selector.modify(sock, mask, self._receive)

    def _send_one(self, sock: FrameSocket) -> bool:
        """Flush the socket, then send one message; return whether nothing more can be sent now."""
        with ExitStack() as stack:
            with self.lock:
                stack.enter_context(self._send_lock)
                sock.flush()
                outgoing = self.session.pop_outgoing(time.monotonic()) if sock.is_flushed else None
                if outgoing is not None:
                    self._watch_resident_movers()
                # Duplicates: the session may close its own while these wait for the socket.
                fds = dup_fds(outgoing.fds) if outgoing is not None else ()
            if outgoing is not None:
                sock.send(encode(outgoing.message), fds)
                sock.flush()
        return outgoing is None

    def _receive(self) -> None:
        assert self._socket is not None, "it is watched as long as it is there"
        try:
            frames = self._socket.receive()
        except ProtocolError as error:
            self._disconnect(error.code, error.message)
            return
        if frames is None:
            self._disconnect(Code.DAEMON_LOST, "the daemon closed the connection")
            return
        for position, frame in enumerate(frames):
            try:
                self._handle_frame(frame)
            except KvxferdError as error:
                for later in frames[position + 1 :]:
                    close_fds(later.fds)
                self._disconnect(error.code, error.message)
                return
        with self.lock:
            self.state_changed.notify_all()

    def _handle_frame(self, frame: Frame) -> None:
        fds = deque(frame.fds)  # those without an owner yet
        page: FencePage | None = None
        try:
            message = DAEMON_MESSAGES.decode(frame.payload)
            self._check_num_fds(message, len(fds))
            if self.session.carries_fence_page(message):
                page = FencePage(fds.popleft())
            # The pidfd first: the session may only use movers that are watched.
            while fds:
                self._watch_mover(fds[0])
                fds.popleft()
        except BaseException:
            close_fds(fds)
            if page is not None:
                page.close()
            raise
        with self.lock:
            self._receive_deliveries()
            if self._disconnect_reason is None:
                self.session.handle(message, time.monotonic(), page)
            elif page is not None:
                page.close()

    def _check_num_fds(self, message: worker.DaemonMessage, num_fds: int) -> None:
        carries_one = isinstance(message, worker.MoverOffered) or self.session.carries_fence_page(message)
        wanted = 1 if carries_one else 0
        if num_fds != wanted:
            raise ProtocolError(f"{type(message).__name__} carries {wanted} descriptors: {num_fds} came")

    def _watch_mover(self, pidfd: int) -> None:
        """Watch a mover. Owns the pidfd from then on, unless it raises ProtocolError."""
        try:
            self._mover_watch.watch(self.session.epoch, pidfd)
        except OSError as error:
            raise ProtocolError(f"cannot watch a mover by the descriptor that came: {error}") from error

    def _watch_resident_movers(self) -> None:
        """Watch the movers that were started in this process. With the lock held."""
        for mover in self.session.registration.pop_unwatched_movers():
            self._mover_watch.watch(self.session.epoch, os.dup(mover.fileno()))

    def _disconnect(self, code: Code, why: str) -> None:
        if self._socket is None:
            return
        now = time.monotonic()
        self._selector.unregister(self._socket)
        with self._send_lock:
            self._socket.close()
            self._socket = None
        if now - self._connected_at > STABLE_S:
            self._num_attempts = 0
        self._schedule_reconnect(now)
        with self.lock:
            self._watch_resident_movers()
            self._receive_deliveries()
            self.session.connection_lost(now, code, why)
            if code in PERMANENT_REFUSALS:
                self.session.fail_permanently(code, why)
            self.state_changed.notify_all()
        self._mover_watch.connection_ended(self.session.epoch)

    def _handle_movers_exited(self, epoch: int) -> None:
        with self.lock:
            self._receive_deliveries()
            self.session.movers_exited(epoch)

    def _shut_down(self, code: Code, why: str) -> None:
        with self.lock:
            self._closing = True
            self._send_final_deliveries()
            resident_movers = self.session.registration.stop_movers()
        # Without the lock: engine threads would wait too.
        all_quiesced = wait_all_quiesced(resident_movers, RESIDENT_EXIT_S)
        with self.lock:
            self._send_final_deliveries()
            if self.session.registration.is_resident and all_quiesced:
                self.session.resident_movers_exited(time.monotonic(), code, why)
            self.session.close(code, why)
            self._is_shut_down = True
            self.state_changed.notify_all()
        with self._send_lock:
            if self._socket is not None:
                self._socket.close()
        self._mover_watch.close()

    def _send_final_deliveries(self) -> None:
        """Report to the daemon which pulls have been delivered. With the lock held."""
        self._receive_deliveries()
        deliveries = self.session.pop_final_deliveries()
        with self._send_lock:
            if deliveries is not None and self._socket is not None:
                self._socket.send(encode(deliveries))
                self._socket.flush()


class DeliverySocketPair:
    """The sockets on which a rank's mover reports deliveries to the worker itself, past the daemon.

    Movers write into one end, this process reads the other. No call blocks.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )

    @property
    def mover_fd(self) -> int:
        """The descriptor that goes to the daemon. Kept open: the next daemon gets it too."""
        return self._write_end.fileno()

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are deliveries."""
        return self._read_end.fileno()

    def receive(self) -> Iterator[worker.TicketDelivered]:
        """Yield the deliveries that have come, oldest first. Raises ProtocolError for any other packet.

        Only this side ends the stream: the far end is open here too, so an empty read is an empty packet.
        """
        while self._read_end.fileno() >= 0:
            try:
                packet = self._read_end.recv(MAX_DELIVERY_BYTES)
            except BlockingIOError:
                return
            yield MOVER_DELIVERIES.decode(packet)

    def close(self) -> None:
        """Close both ends. Idempotent."""
        self._read_end.close()
        self._write_end.close()


def _is_permanent(error: OSError | None) -> bool:
    return error is not None and error.errno not in _TRANSIENT_ERRNOS


def _connect_unix(path: Path) -> socket.socket:
    """Return a socket connected to `path`. Raises OSError; never waits."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.connect(os.fspath(path))
    except BaseException:
        sock.close()
        raise
    return sock
