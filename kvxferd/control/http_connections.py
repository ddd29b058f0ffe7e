"""Limits HTTP connections: their number, their sources and their time.

aiohttp accepts without limit and waits without limit for a slow reader, so connections are accepted here.
There are three shares: TCP; users on control.sock; root and the daemon's own user there. A full share does
not affect the others. In a full share a new connection replaces the oldest idle one of the source that has
the most, so that a client that holds connections open does not keep others out of its share either.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import structlog
from aiohttp import web

from kvxferd.control.fd_budget import reserved_fds
from kvxferd.unix_socket import credentials_of, is_own_uid

log = structlog.get_logger()

HEADER_S = 10.0  # from the accept to the first whole request
IDLE_S = 60.0  # between requests; Prometheus scrapes every 15 to 60 s, and connects again if it must
REPLY_S = 30.0  # for an unprivileged request, reading its body included
WRITE_S = 10.0  # for the client to read a response: 8 MiB take 1 s on a slow link
LINGER_S = 1.0  # aiohttp's, for a body that no handler read
SWEEP_S = 1.0
ACCEPT_RETRY_S = 0.2
ACCEPTS_PER_TURN = 16
BACKLOG = 128
# Request line, headers and body that may wait on one connection: no route takes more than a few names, and
# a browser's cookies for this host have 4 KiB. 128 connections have 8 MiB, and five times that as Python
# objects.
MAX_REQUEST_BYTES = 64 << 10
MAX_LINE_BYTES = 8 << 10  # two names of 256 characters of any kind
MAX_HEADERS = 64
# Unread responses on all unprivileged connections together: four of the largest (8,192 transfers with names
# of 256 characters), or 16 of a full node.
MAX_UNSENT_BYTES = 32 << 20

_RESPONSE_503 = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
)


class ConnectionShare:
    """The connections of one kind of client."""

    def __init__(self, max_connections: int, *, is_operator: bool = False) -> None:
        self.max_connections = max_connections
        self.is_operator = is_operator  # root or the daemon's own user, on control.sock
        self.connections: dict[HttpConnection, None] = {}  # oldest first

    def make_room(self) -> bool:
        """Close an idle connection if the share is full. False: all of them are handling requests."""
        if len(self.connections) < self.max_connections:
            return True
        return self.close_idle()

    def close_idle(self) -> bool:
        """Close an idle connection, even if the share is not full. False: there is none."""
        num_of = Counter(connection.source for connection in self.connections)
        idle = [connection for connection in self.connections if not connection.is_handling]
        if not idle:
            return False
        # The first of the source with the most: connections are in the order of their arrival.
        max(idle, key=lambda connection: num_of[connection.source]).abort()
        return True


class HttpConnection(web.RequestHandler):
    """aiohttp's protocol of one connection, with limits added."""

    def __init__(
        self, server: web.Server, listeners: HttpListeners, share: ConnectionShare, source: str
    ) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=IDLE_S,
            lingering_time=LINGER_S,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
        )
        self.listeners = listeners
        self.share = share
        self.source = source
        self.is_handling = False
        self._num_requests = 0
        self._state_since = self._loop.time()
        self._num_received_bytes = 0
        self._is_aborted = False
        share.connections[self] = None

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes of responses that the client has not read."""
        transport = self.transport
        return 0 if transport is None else transport.get_write_buffer_size()

    def request_started(self) -> None:
        """Record that a request is complete and is being handled."""
        self.is_handling = True
        self._num_requests += 1
        self._state_since = self._loop.time()

    def request_finished(self) -> None:
        """Record that the response is ready to be sent."""
        self.is_handling = False
        self._num_received_bytes = 0
        self._state_since = self._loop.time()

    def is_overdue(self, now: float) -> bool:
        """Whether the client has used up its time."""
        waited_s = now - self._state_since
        if self.is_handling:
            return not self.share.is_operator and waited_s > REPLY_S
        if self.num_unsent_bytes:
            return waited_s > WRITE_S
        return waited_s > (IDLE_S if self._num_requests else HEADER_S)

    def abort(self) -> None:
        """Close the connection at once; unsent data is lost."""
        self._is_aborted = True
        self.share.connections.pop(self, None)
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start, unless the connection was closed while it was being accepted."""
        super().connection_made(transport)
        if self._is_aborted:
            self.abort()

    def data_received(self, data: bytes) -> None:
        """Parse bytes, up to the limit of a request."""
        self._num_received_bytes += len(data)
        if self._num_received_bytes > MAX_REQUEST_BYTES:
            self.abort()
            return
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Leave the share."""
        self.share.connections.pop(self, None)
        super().connection_lost(exc)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log nothing: malformed HTTP is the client's fault, and handlers log their own errors."""


class HttpListeners:
    """Accepts connections for one aiohttp server and enforces their time limits."""

    def __init__(self, server: web.Server, max_connections: int) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._tcp = ConnectionShare(max_connections // 2)
        self._users = ConnectionShare(max_connections // 4)
        self._operators = ConnectionShare(max_connections // 4, is_operator=True)
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.TimerHandle | None = None  # while there are connections

    @property
    def shares(self) -> tuple[ConnectionShare, ConnectionShare, ConnectionShare]:
        """The shares: TCP, users on control.sock, operators on control.sock."""
        return self._tcp, self._users, self._operators

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes of responses that unprivileged clients have not read."""
        return sum(c.num_unsent_bytes for share in (self._tcp, self._users) for c in share.connections)

    def listen(self, listener: socket.socket) -> None:
        """Accept connections from that socket, which `close` closes."""
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._listeners.append(listener)
        self._watch(listener)

    async def close(self) -> None:
        """Close the listeners, and connections that are still being accepted."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())
            listener.close()
        self._listeners.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _watch(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            for _ in range(ACCEPTS_PER_TURN):
                self._add_connection(*listener.accept())
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            # No descriptor is left: an idle connection gives way, and accept is tried again later.
            log.warning("http accept failed", reason=error.strerror)
            self._close_idle_stranger()
            if listener.family == socket.AF_UNIX:
                self._accept_operators(listener)
            self._loop.remove_reader(listener.fileno())
            self._loop.call_later(ACCEPT_RETRY_S, self._watch, listener)

    def _accept_operators(self, listener: socket.socket) -> None:
        """Accept operators who wait, with reserved descriptors, and refuse others."""
        with reserved_fds(), suppress(OSError):
            for _ in range(ACCEPTS_PER_TURN):
                accepted, address = listener.accept()
                if self._is_operator(accepted):
                    self._add_connection(accepted, address)
                else:
                    _reject_full(accepted)

    def _close_idle_stranger(self) -> None:
        """Close an idle unprivileged connection, of the larger share first; operators' stay."""
        strangers = sorted(self.shares[:2], key=lambda share: len(share.connections), reverse=True)
        any(share.close_idle() for share in strangers)

    def _is_operator(self, accepted: socket.socket) -> bool:
        return accepted.family == socket.AF_UNIX and is_own_uid(credentials_of(accepted).uid)

    def _add_connection(self, accepted: socket.socket, address: Any) -> None:
        share, source = self._tcp, ""
        if accepted.family == socket.AF_UNIX:
            uid = credentials_of(accepted).uid
            share, source = self._users, f"uid {uid}"
            if self._is_operator(accepted):
                share = self._operators
        else:
            source = source_of(str(address[0]))
        if not share.make_room():
            _reject_full(accepted)
            return
        accepted.setblocking(False)
        connection = HttpConnection(self._server, self, share, source)
        self._start_task(self._connect(connection, accepted))
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)

    async def _connect(self, connection: HttpConnection, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: connection, accepted)
        except (OSError, asyncio.CancelledError):
            connection.abort()
            accepted.close()

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _sweep(self) -> None:
        now = self._loop.time()
        for share in self.shares:
            for connection in [c for c in share.connections if c.is_overdue(now)]:
                connection.abort()
        is_any = any(share.connections for share in self.shares)
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep) if is_any else None


def source_of(host: str) -> str:
    """Return the source that an address counts for, as one client may have many addresses.

    Every process of this node may use any address of 127.0.0.0/8, and an IPv6 client any of its 64 bits.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_loopback:
        return "loopback"
    if address.version == 6:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


def _reject_full(accepted: socket.socket) -> None:
    with accepted, suppress(OSError):
        accepted.setblocking(False)
        accepted.send(_RESPONSE_503)
