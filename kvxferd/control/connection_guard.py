"""Limits connections to the peer socket: how many, and how much each may send before its handshake is done.

libzmq accepts every connection, and reads a first message of full length before it has authenticated the
sender: 40 unauthenticated connections made a daemon hold 641 MiB. libzmq has no setting against that, so a
thread watches its monitor and shuts such connections down.
"""

from __future__ import annotations

import fcntl
import os
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
        port: int = 0,  # known once the socket is bound
        *,
        has_curve: bool = False,
        request_read: Callable[[], object] = lambda: None,
        max_connections: int = MAX_CONNECTIONS,
        max_per_address: int = MAX_PER_ADDRESS,
        max_unfinished: int = MAX_UNFINISHED,
    ) -> None:
        """`request_read` has messages read that may be there, on another thread."""
        self._bound = bound
        self._request_read = request_read
        self._port = port
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
        self._monitor = bound.get_monitor_socket(MONITOR_EVENTS)
        self._thread = threading.Thread(target=self._run, name="peer-connections", daemon=True)

    def start(self) -> None:
        """Start the thread. Call it before the socket is bound, so that no connection is missed.

        Raises ConfigError where the system has no thread.
        """
        try:
            start_thread(self._thread, "watch connections to the peer socket")
        except ConfigError:
            self._monitor.close(linger=0)
            raise

    def set_port(self, port: int) -> None:
        """Watch connections to this port. Those that were accepted before are not checked."""
        self._port = port

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
        try:
            while True:
                if poller.poll(self._next_check_ms()):
                    if time.monotonic() - self._checked_at > CHECK_INTERVAL_MS / 1000:
                        self._check_unfinished()  # also under a steady flow of new connections
                    message = parse_monitor_message(self._monitor.recv_multipart())
                    if message["event"] == zmq.EVENT_MONITOR_STOPPED:
                        return
                    self._handle_monitor_event(int(message["event"]), int(message["value"]))
                else:
                    self._check_unfinished()
                if time.monotonic() - self._open_checked_at > self._open_check_s:
                    self._check_open()
        finally:
            self._monitor.close(linger=0)
            for connection in self._connections.values():
                if connection.duplicate is not None:
                    connection.duplicate.close()

    def _next_check_ms(self) -> int | None:
        if self._unfinished:
            return CHECK_INTERVAL_MS
        return int(self._open_check_s * 1000) + 1 if self._connections else None

    def _handle_monitor_event(self, event: int, fd: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._on_accepted(fd)
        elif event == zmq.EVENT_DISCONNECTED:
            self._on_disconnected(fd)

    def _on_accepted(self, fd: int) -> None:
        self._on_disconnected(fd)  # the former connection of that number, if libzmq did not report its end
        ours = self._duplicate(fd)
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
        """Return a copy of the fd. Its number may be reused by now: it must be a connection to this port."""
        try:
            copy = os.dup(fd)
        except OSError:
            return None
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

    def _on_disconnected(self, fd: int) -> None:
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
        for fd, connection in list(self._connections.items()):
            if fd in self._unfinished or (num_bytes := self._num_read_bytes(fd)) is None:
                continue
            num_messages = self._num_messages.get(fd, 0)
            if num_messages != connection.num_messages:
                connection.num_messages, connection.first_bytes = num_messages, num_bytes
            elif connection.last_bytes - connection.first_bytes > MAX_INCOMPLETE_BYTES and is_current:
                self._shut_down(fd, f"a message of over {MAX_INCOMPLETE_BYTES} bytes has no end")
            connection.last_bytes = num_bytes
            is_suspect |= num_bytes - connection.first_bytes > MAX_INCOMPLETE_BYTES
        # After the last look: what is read by then may be in a queue that was empty during this check.
        self._open_checked_at = time.monotonic()
        self._open_check_s = max(OPEN_CHECK_S, (self._open_checked_at - began) / OPEN_CHECK_SHARE)
        if is_suspect:
            self._request_read()

    def _num_read_bytes(self, fd: int) -> int | None:
        """Return how many bytes libzmq has read; None where the connection is gone."""
        connection = self._duplicate(fd)
        if connection is None:
            return None
        with connection, suppress(OSError):
            num_received = tcp_byte_counts(connection)[1]  # first: what comes between the two calls is unread
            (num_unread,) = struct.unpack("i", fcntl.ioctl(connection, termios.FIONREAD, bytes(4)))
            return num_received - int(num_unread)
        return None

    def _shut_down(self, fd: int, reason: str) -> None:
        """Shut the connection; libzmq notices its end and closes it."""
        connection = self._connections[fd]
        self._unfinished.pop(fd, None)
        if connection.duplicate is None:
            connection.duplicate = self._duplicate(fd)
        if connection.duplicate is not None:
            with suppress(OSError):
                connection.duplicate.shutdown(socket.SHUT_RDWR)
            connection.duplicate.close()
            connection.duplicate = None
        address = connection.address
        log.warning("peer turned away", limit_by=address, address=address, reason=reason)


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
