"""Limits connections to the peer socket: how many, and how much each may send before its handshake is done.

libzmq accepts every connection, and reads a first message of full length before it has authenticated the
sender: 40 unauthenticated connections made a daemon hold 641 MiB. libzmq has no setting against that, so a
thread watches its monitor and shuts such connections down.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import socket
import struct
import termios
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from kvxferd.errors import ConfigError
from kvxferd.threads import start_thread
from kvxferd.wire.limits import MAX_PEER_REQUEST_BYTES

log = structlog.get_logger()

# A peer has one connection to this node. There are 512 peers at most, and behind one address
# several daemons (one for each engine), or many nodes behind a gateway.
MAX_CONNECTIONS = 2048
MAX_PER_ADDRESS = 256
# Connections whose handshake is not done. An honest one takes three round trips. Past the limit the oldest
# is closed, of the address that has most, so that one client with hundreds does not keep others out.
MAX_UNFINISHED = 64
# A handshake by CURVE sends 64 + 202 + about 400 bytes.
MAX_HANDSHAKE_BYTES = 8192
# How often unfinished ones are checked. At 1 GB/s, all that one I/O thread reads, 10 MB arrive meanwhile.
CHECK_INTERVAL_MS = 10
STOP_S = 2.0

# After its handshake: of a message that is not complete, with what frames and encryption add. libzmq bounds a
# part, not how many there are, and keeps each in 64 bytes: 26 MB of empty parts took 750 MB in two seconds.
MAX_INCOMPLETE_BYTES = MAX_PEER_REQUEST_BYTES + (64 << 10)
OPEN_CHECK_S = 0.2
OPEN_CHECK_SHARE = 0.02  # of a core, at most, for connections that are open: each takes 10 us

# The monitor reports which connection opened and closed, but not whose handshake is done. The number of
# bytes that libzmq has sent shows it: a greeting of 64 bytes, with CURVE a WELCOME of 170, and at last a
# READY of at least 40; a refusal has 12.
FINISHED_CURVE_BYTES = 64 + 170 + 40
FINISHED_NULL_BYTES = 64 + 40

# Offsets of tcpi_bytes_acked and tcpi_bytes_received, since Linux 4.1.
_BYTES_ACKED, _BYTES_RECEIVED = 120, 128
_TCP_INFO_BYTES = 136

MONITOR_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED


@dataclass(slots=True)
class _Connection:
    """A connection that libzmq accepted. `duplicate` is a copy of its fd until the handshake is done."""

    address: str
    duplicate: socket.socket | None
    is_suspect: bool = False  # it had sent too much at the last check
    # Of an open one: messages that were read of it, and bytes when their number was first seen, and last.
    num_messages: int = -1
    first_bytes: int = 0
    last_bytes: int = 0


class ConnectionGuard:
    """Watches one bound socket from a thread of its own."""

    def __init__(
        self,
        bound: zmq.Socket[bytes],
        *,
        has_curve: bool = False,
        request_read: Callable[[], object] = lambda: None,
        max_connections: int = MAX_CONNECTIONS,
        max_per_address: int = MAX_PER_ADDRESS,
        max_unfinished: int = MAX_UNFINISHED,
    ) -> None:
        """Make it before the socket is bound, so that no connection is missed.

        `request_read` has messages read that may be there, on another thread.
        """
        self._request_read = request_read
        self._port = 0  # of the bound socket
        self._finished_bytes = FINISHED_CURVE_BYTES if has_curve else FINISHED_NULL_BYTES
        self._limits = (max_connections, max_per_address, max_unfinished)
        self._checked_at = 0.0
        self._open_checked_at, self._open_check_s = 0.0, OPEN_CHECK_S
        # Written by the thread that reads: messages that came over each descriptor; when none was left.
        self._num_messages: dict[int, int] = {}
        self._emptied_at = 0.0
        self._connections: dict[int, _Connection] = {}
        self._unfinished: OrderedDict[int, None] = OrderedDict()  # the oldest first
        self._per_address: Counter[str] = Counter()
        self._untracked: set[int] = set()  # accepted while no descriptor was free to look at them
        self._wake_lock, self._is_closed = threading.Lock(), False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # of `shut_all`
        self._unshut: set[int] = set()  # to be shut as soon as a descriptor is free to do it
        # Tells once that something has arrived on an open connection; until then there is nothing to check.
        self._arrivals = select.epoll()
        self._is_checking_open = False
        self._monitor = bound.get_monitor_socket(MONITOR_EVENTS)
        self._thread = threading.Thread(target=self._run, name="peer-connections", daemon=True)

    def start(self, port: int) -> None:
        """Start the thread. `port`: of the socket, which is bound. Raises ConfigError without a thread."""
        self._port = port
        try:
            start_thread(self._thread, "watch connections to the peer socket")
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """Close what it has, if it was not started; else its thread does."""
        with self._wake_lock:
            self._is_closed = True
            os.close(self._wake_fd)
        self._monitor.close(linger=0)
        self._arrivals.close()
        for connection in self._connections.values():
            if connection.duplicate is not None:
                connection.duplicate.close()

    def shut_all(self) -> None:
        """Have every connection shut that libzmq has accepted. From any thread.

        The guard's thread does it once it has heard of all that came before, as soon as descriptors are free.
        libzmq sees the end of the stream and closes its side. A peer that is still admitted connects again in
        a tenth of a second, and sends its unanswered requests again.
        """
        with self._wake_lock:
            if not self._is_closed:
                os.eventfd_write(self._wake_fd, 1)

    def count_message(self, fd: int) -> None:
        """Record that a message was read which came over libzmq's descriptor `fd`."""
        self._num_messages[fd] = self._num_messages.get(fd, 0) + 1

    def queue_is_empty(self) -> None:
        """Record that every message that is complete has been read."""
        self._emptied_at = time.monotonic()

    def join(self) -> None:
        """Wait for the thread to end, which it does once the socket is closed and reaped.

        The monitor ends with its socket, not by `disable_monitor`: pyzmq calls libzmq while it holds the GIL,
        libzmq waits for its I/O thread, that one for room in the monitor's queue, so for this thread, and
        this thread for the GIL. A flood of connections made every stop hang this way.
        """
        self._thread.join(STOP_S)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._arrivals.fileno(), zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll(self._next_check_ms()))
                if time.monotonic() - self._checked_at > CHECK_INTERVAL_MS / 1000:
                    self._check_unfinished()  # also under a steady flow of new connections
                if self._monitor in ready and not self._handle_monitor_event():
                    return
                if self._wake_fd in ready and not self._begin_to_shut():
                    return
                self._shut_some()
                if self._arrivals.fileno() in ready:
                    self._is_checking_open = bool(self._arrivals.poll(0)) or self._is_checking_open
                elapsed_s = time.monotonic() - self._open_checked_at
                if self._is_checking_open and elapsed_s > self._open_check_s:
                    self._check_open()
        finally:
            self.close()

    def _next_check_ms(self) -> int | None:
        if self._unfinished or self._untracked or self._unshut:
            return CHECK_INTERVAL_MS
        return int(self._open_check_s * 1000) + 1 if self._is_checking_open else None

    def _begin_to_shut(self) -> bool:
        """Note all connections that were accepted before `shut_all`. False: the socket is closed."""
        os.eventfd_read(self._wake_fd)
        while self._monitor.poll(0):
            if not self._handle_monitor_event():
                return False
        self._unshut = {*self._connections, *self._untracked}
        log.info("peer connections closed", connections=len(self._unshut))
        return True

    def _shut_some(self) -> None:
        for fd in list(self._unshut):
            try:
                connection = self._duplicate(fd)
            except OSError:  # no descriptor is free
                return
            self._unshut.discard(fd)
            if connection is not None:
                with connection, suppress(OSError):  # its other end has closed it
                    connection.shutdown(socket.SHUT_RDWR)

    def _handle_monitor_event(self) -> bool:
        """Handle an event of libzmq's. False: it was the last."""
        message = parse_monitor_message(self._monitor.recv_multipart())
        event, fd = message["event"], int(message["value"])
        if event == zmq.EVENT_ACCEPTED:
            self._on_accepted(fd)
        elif event == zmq.EVENT_DISCONNECTED:
            self._on_disconnected(fd)
        return event != zmq.EVENT_MONITOR_STOPPED

    def _on_accepted(self, fd: int) -> None:
        self._on_disconnected(fd)  # the former connection of that number, if libzmq did not report its end
        try:
            ours = self._duplicate(fd)
        except OSError:
            self._untracked.add(fd)
            return
        if ours is None:
            return
        try:
            address = ours.getpeername()[0]
        except OSError:
            ours.close()
            return
        self._connections[fd] = _Connection(address, ours)
        self._unfinished[fd] = None
        self._per_address[address] += 1
        max_connections, max_per_address, max_unfinished = self._limits
        if len(self._connections) > max_connections:
            self._shut_down(fd, f"{max_connections} connections are there")
        elif self._per_address[address] > max_per_address:
            self._shut_down(fd, f"{max_per_address} connections of that address are there")
        elif len(self._unfinished) > max_unfinished:
            self._shut_down(
                self._most_suspect(), f"{max_unfinished} connections have not finished their handshake"
            )

    def _duplicate(self, fd: int) -> socket.socket | None:
        """Return a copy of the fd; None where its number is no connection to this port by now.

        Raises OSError where no descriptor is free.
        """
        try:
            copy = os.dup(fd)
        except OSError as error:
            if error.errno == errno.EBADF:
                return None
            raise
        try:
            ours = socket.socket(fileno=copy)
        except OSError:  # the number no longer belongs to a socket
            os.close(copy)
            return None
        with suppress(OSError, IndexError, TypeError):
            if ours.getsockname()[1] == self._port:
                return ours
        ours.close()
        return None

    def _most_suspect(self) -> int:
        """Return the oldest unfinished connection of the address that has most of them."""
        counts = Counter(self._connections[fd].address for fd in self._unfinished)
        address, _ = counts.most_common(1)[0]
        return next(fd for fd in self._unfinished if self._connections[fd].address == address)

    def _on_handshake_done(self, fd: int) -> None:
        connection = self._connections[fd]
        del self._unfinished[fd]
        if connection.duplicate is not None:
            connection.duplicate.close()
            connection.duplicate = None
        with suppress(OSError):  # it is closed by now
            self._arrivals.register(fd, select.EPOLLIN | select.EPOLLONESHOT)

    def _on_disconnected(self, fd: int) -> None:
        self._untracked.discard(fd)
        self._unshut.discard(fd)
        connection = self._connections.pop(fd, None)
        if connection is None:
            return
        self._unfinished.pop(fd, None)
        self._num_messages.pop(fd, None)
        self._per_address[connection.address] -= 1
        if not self._per_address[connection.address]:
            del self._per_address[connection.address]
        if connection.duplicate is not None:
            connection.duplicate.close()

    def _check_unfinished(self) -> None:
        self._checked_at = time.monotonic()
        for fd in list(self._untracked):
            is_unshut = fd in self._unshut
            self._on_accepted(fd)
            if is_unshut:
                self._unshut.add(fd)
        for fd in list(self._unfinished):
            connection = self._connections[fd]
            assert connection.duplicate is not None
            sent, received = tcp_byte_counts(connection.duplicate)
            if sent >= self._finished_bytes:
                self._on_handshake_done(fd)
            elif received > MAX_HANDSHAKE_BYTES and connection.is_suspect:
                self._shut_down(fd, f"it sent over {MAX_HANDSHAKE_BYTES} bytes before its handshake was over")
            else:
                # Once may be an honest peer's first message behind a handshake that libzmq has not read yet.
                connection.is_suspect = received > MAX_HANDSHAKE_BYTES

    def _check_open(self) -> None:
        """Shut connections whose message has grown too large without an end.

        What libzmq had read of a connection by a check belongs to a message that is not complete, if since
        then the queue of complete messages was empty once, and none of this connection was read.
        """
        began, is_current, is_suspect = time.monotonic(), self._emptied_at > self._open_checked_at, False
        self._is_checking_open = False
        for fd, connection in list(self._connections.items()):
            if fd in self._unfinished or (num_bytes := self._num_read_bytes(fd)) is None:
                continue
            num_messages = self._num_messages.get(fd, 0)
            if num_messages != connection.num_messages:
                connection.num_messages, connection.first_bytes = num_messages, num_bytes
            elif connection.last_bytes - connection.first_bytes > MAX_INCOMPLETE_BYTES and is_current:
                self._shut_down(fd, f"a message of over {MAX_INCOMPLETE_BYTES} bytes has no end")
            if num_bytes != connection.last_bytes:
                self._is_checking_open = True
            else:
                with suppress(OSError):
                    self._arrivals.modify(fd, select.EPOLLIN | select.EPOLLONESHOT)
            connection.last_bytes = num_bytes
            is_suspect |= num_bytes - connection.first_bytes > MAX_INCOMPLETE_BYTES
        # After the last look: what is read by then may be in a queue that was empty during this check.
        self._open_checked_at = time.monotonic()
        self._open_check_s = max(OPEN_CHECK_S, (self._open_checked_at - began) / OPEN_CHECK_SHARE)
        if is_suspect:
            self._is_checking_open = True
            self._request_read()

    def _num_read_bytes(self, fd: int) -> int | None:
        """Return how many bytes libzmq has read; None where the connection is gone."""
        with suppress(OSError):
            if (connection := self._duplicate(fd)) is None:
                return None
            with connection:
                return _num_read_bytes(connection)
        return None

    def _shut_down(self, fd: int, reason: str) -> None:
        """Shut the connection; libzmq notices its end and closes it."""
        connection = self._connections[fd]
        self._unfinished.pop(fd, None)
        with suppress(OSError):
            if connection.duplicate is None:
                connection.duplicate = self._duplicate(fd)
            if connection.duplicate is not None:
                connection.duplicate.shutdown(socket.SHUT_RDWR)
        if connection.duplicate is not None:
            connection.duplicate.close()
            connection.duplicate = None
        address = connection.address
        log.warning("peer turned away", limit_by=address, address=address, reason=reason)


def _num_read_bytes(connection: socket.socket) -> int:
    """Return how many bytes of the connection libzmq has read."""
    num_received = tcp_byte_counts(connection)[1]  # first: what comes between the two calls is unread
    (num_unread,) = struct.unpack("i", fcntl.ioctl(connection, termios.FIONREAD, bytes(4)))
    return num_received - int(num_unread)


def tcp_byte_counts(connection: socket.socket) -> tuple[int, int]:
    """Return how many bytes the other end has acknowledged, and how many arrived from it."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:
        return 0, 0
    if len(info) < _TCP_INFO_BYTES:
        return 0, 0
    (sent,) = struct.unpack_from("Q", info, _BYTES_ACKED)
    (received,) = struct.unpack_from("Q", info, _BYTES_RECEIVED)
    return sent, received
