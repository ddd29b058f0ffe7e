"""libzmq as far as `kvxferd.control.peer_socket` uses it, over the simulated network.

Each context has one I/O thread in its process, as libzmq has: what arrives waits in the kernel until that
thread runs, then in the socket's queue, up to its high-water mark; what is sent waits in a queue of its own.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import zmq
from zmq.utils import z85

from tests.simulation.kernel import Kernel, Process, Task
from tests.simulation.network import Network, Wire

_FD, _EVENTS, _LAST_ENDPOINT = int(zmq.FD), int(zmq.EVENTS), int(zmq.LAST_ENDPOINT)
_POLLIN, _MORE = int(zmq.POLLIN), int(zmq.SNDMORE)
_MONITOR_STOPPED = int(zmq.EVENT_MONITOR_STOPPED)
_CURVE_SERVER, _SECRET_KEY = int(zmq.CURVE_SERVER), int(zmq.CURVE_SECRETKEY)
_SERVER_KEY, _PUBLIC_KEY = int(zmq.CURVE_SERVERKEY), int(zmq.CURVE_PUBLICKEY)


class SimFrame:
    """`zmq.Frame`."""

    def __init__(self, content: bytes, address: str = "", user: str = "") -> None:
        self.bytes = content
        self.more = False
        self._metadata = {b"Peer-Address": address, b"User-Id": user}

    def get(self, name: object) -> Any:
        """Return libzmq's metadata of the connection."""
        return self._metadata.get(name, "") if isinstance(name, bytes) else 0


class SimTracker:
    """`zmq.MessageTracker`: whether libzmq has written a message."""

    def __init__(self) -> None:
        self.done = False


class SimContext:
    """`zmq.Context`: its I/O thread moves messages between the network and the sockets' queues."""

    network: Network

    def __init__(self) -> None:
        self.process: Process = self.network.kernel.current.process
        self.sockets: list[SimSocket] = []
        self.monitors: dict[str, SimMonitor] = {}  # by address, until a dealer reports there
        self.authenticator: SimSocket | None = None  # who says whether a connection is admitted
        self.num_asked = 0  # how often
        self._is_woken = False
        self._is_over = False
        self._io_thread: Task = self.network.kernel.start_thread(f"{self.process.name} libzmq", self._run)
        self.process.on_death.append(lambda: self.network.process_died(self.process))

    def set(self, option: int, value: int) -> None:
        """Take an option, and do nothing."""

    def socket(self, kind: int) -> SimSocket | SimMonitor:
        """Return a new socket."""
        try:
            if kind == zmq.PAIR:
                return SimMonitor(self)
            made = SimSocket(self, int(kind))
        except OSError as error:
            raise zmq.ZMQError(error.errno) from error
        self.sockets.append(made)
        return made

    def term(self) -> None:
        """End the I/O thread."""
        self._is_over = True
        self.wake()

    def wake(self) -> None:
        """Have the I/O thread look at its sockets."""
        self._is_woken = True
        self.network.kernel.notify(self._io_thread)

    def _run(self) -> None:
        while not self._is_over:
            while not self._is_woken:
                self.network.kernel.wait((), None)
            self._is_woken = False
            for socket in list(self.sockets):
                socket.move()


class SimMonitor:
    """The PAIR on which libzmq reports what becomes of a dealer's connection."""

    def __init__(self, context: SimContext) -> None:
        self._context = context
        self.closed = False
        self._reports: deque[SimFrame] = deque()
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def connect(self, address: str) -> None:
        self._context.monitors[address] = self

    def report(self, event: int) -> None:
        """Report an event of the connection."""
        if not self.closed:
            self._reports.append(SimFrame(event.to_bytes(2, sys.byteorder) + bytes(4)))
            os.eventfd_write(self._event_fd, 1)

    def getsockopt(self, option: int) -> int:
        if int(option) == _FD:
            return self._event_fd
        _clear(self._event_fd)
        return _POLLIN if self._reports else 0

    def recv(self, flags: int = 0, copy: bool = True) -> SimFrame:
        return self._reports.popleft()

    def recv_multipart(self, flags: int = 0, copy: bool = True) -> list[SimFrame]:
        return [self.recv()]

    def close(self, linger: int | None = None) -> None:
        self.closed = True
        os.close(self._event_fd)


class SimPoller:
    """`zmq.Poller`, over monitors whose dealers are closed: all is there that will be."""

    def __init__(self) -> None:
        self._monitors: list[SimMonitor] = []

    def register(self, monitor: SimMonitor, events: int) -> None:
        self._monitors.append(monitor)

    def unregister(self, monitor: SimMonitor) -> None:
        self._monitors.remove(monitor)

    def poll(self, timeout_ms: int) -> list[tuple[SimMonitor, int]]:
        return [(monitor, _POLLIN) for monitor in self._monitors if monitor.getsockopt(_EVENTS)]


class SimSocket:
    """`zmq.Socket`, of the kinds ROUTER and DEALER."""

    def __init__(self, context: SimContext, kind: int) -> None:
        self.context = context
        self.network = context.network
        self.process = context.process
        self.kind = kind
        self.closed = False
        self.copy_threshold = 0
        self.host = ""
        self.wire: Wire | None = None  # of a dealer
        self._wires: dict[bytes, Wire] = {}  # of a router
        self._address = ""
        self._options: dict[int, Any] = {}
        self._received: deque[tuple[Wire | None, list[bytes]]] = deque()  # None: of libzmq itself
        self._to_ask: deque[list[bytes]] = deque()  # of an authenticator, requests by ZAP
        self._asked: dict[bytes, Callable[[str | None], None]] = {}  # by their numbers, who waits for a reply
        self._unread: dict[Wire, int] = {}  # how many of each connection are in `_received`
        self._parts: deque[SimFrame | bytes] = deque()  # of the message that is being read
        self._outgoing: dict[Wire | None, deque[tuple[bytes, SimTracker | None]]] = {}
        self._route_of_next: bytes | None = None  # the first part of what is being sent
        self._monitor: SimMonitor | None = None
        self._to_report: deque[int] = deque()  # to it, by the I/O thread
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    # --- options and addresses

    def setsockopt(self, option: int, value: object) -> None:
        self._options[int(option)] = value

    def getsockopt(self, option: int) -> int:
        if int(option) == _FD:
            return self._event_fd
        assert int(option) == _EVENTS
        _clear(self._event_fd)
        return _POLLIN if self._received or self._parts else 0

    def getsockopt_string(self, option: int) -> str:
        assert int(option) == _LAST_ENDPOINT
        return self._address

    def bind(self, address: str) -> None:
        if address.startswith("inproc:"):
            self.context.authenticator = self
            return
        if address in self.network.listeners:
            raise zmq.ZMQError(zmq.EADDRINUSE)
        self._address, self.host = address, _host_of(address)
        self.network.listeners[address] = self

    def unbind(self, address: str) -> None:
        self.network.listeners.pop(address, None)

    def monitor(self, address: str, events: int) -> None:
        self._monitor = self.context.monitors.pop(address)

    def connect(self, address: str) -> None:
        self._address = address
        self.host = next((s.host for s in self.context.sockets if s.host), "")
        self._outgoing.setdefault(None, deque())
        self.network.connect(self, address)

    def shut_all(self) -> None:
        """Cut all connections to a router."""
        self.network.on_shut(self.process.name)
        for wire in list(self._wires.values()):
            self.network.cut(wire)

    def close(self, linger: int | None = None) -> None:
        if self.closed:
            return
        self.move()
        self.closed = True
        if self.context.authenticator is self:
            self.context.authenticator = None
        if self._monitor is not None:
            self._monitor.report(_MONITOR_STOPPED)
        self.context.sockets.remove(self)
        if self.network.listeners.get(self._address) is self:
            del self.network.listeners[self._address]
        for wire in [*self._wires.values(), *([self.wire] if self.wire is not None else [])]:
            # What was written arrives, then the end.
            self.network.kernel.at(self.network.kernel.now + 0.002, lambda wire=wire: self.network.cut(wire))
        os.close(self._event_fd)

    # --- the network's side

    def connected(self, wire: Wire) -> None:
        """A connection is made."""
        if wire.router is self:
            self._wires[wire.route] = wire
            self._outgoing[wire] = deque()
        else:
            self.wire = wire
            self._to_report.append(int(zmq.EVENT_HANDSHAKE_SUCCEEDED))
        self.wake_io_thread()

    def refused(self, event: int) -> None:
        """The dealer could not connect."""
        self._to_report.append(event)
        self.wake_io_thread()

    def speaks_with(self, router: SimSocket) -> bool:
        """Whether the dealer and a router have keys that fit, or none."""
        secret, wanted = router._options.get(_SECRET_KEY), self._options.get(_SERVER_KEY)
        if not router._options.get(_CURVE_SERVER) or wanted is None:
            return wanted is None and not router._options.get(_CURVE_SERVER)
        return public_of(secret) == wanted

    def ask_whether_admitted(self, dealer: SimSocket, then: Callable[[str | None], None]) -> None:
        """Have the router's authenticator call `then` with the dealer's user, or None: it is turned away."""
        asked = self.context.authenticator
        if asked is None:
            return  # it is closed, and whoever connects tries again
        self.context.num_asked += 1
        number = str(self.context.num_asked).encode()
        key = dealer._options.get(_PUBLIC_KEY)
        credentials = [b"NULL"] if key is None else [b"CURVE", key]
        asked._asked[number] = then
        asked._to_ask.append([number, b"", b"1.0", number, b"", dealer.host.encode(), b"", *credentials])
        asked.wake_io_thread()

    def disconnected(self, wire: Wire) -> None:
        """A connection is lost; what has been received of it stays."""
        if wire.router is self:
            self._wires.pop(wire.route, None)
            for _, tracker in self._outgoing.pop(wire, ()):
                if tracker is not None:
                    tracker.done = True
        elif self.wire is wire:
            self.wire = None
            self._to_report.append(int(zmq.EVENT_DISCONNECTED))
            self.wake_io_thread()
            if not self.closed and not self.process.is_dead:
                self.network.connect(self, self._address)

    def wake_io_thread(self) -> None:
        """Something may be moved."""
        if not self.process.is_dead:
            self.context.wake()

    def move(self) -> None:
        """Move what can be: on the I/O thread, or as the socket is closed."""
        while self._monitor is not None and self._to_report:
            self._monitor.report(self._to_report.popleft())
        if self._to_ask and not self.closed:
            self._received.extend((None, parts) for parts in self._to_ask)
            self._to_ask.clear()
            os.eventfd_write(self._event_fd, 1)
        for wire in [*self._wires.values(), *([self.wire] if self.wire is not None else [])]:
            self._move_out(wire)
            self._move_in(wire)

    def _move_out(self, wire: Wire) -> None:
        to = wire.dealer if wire.router is self else wire.router
        way = wire.way_to(to)
        queue = self._outgoing.get(wire if wire.router is self else None, deque())
        while queue and wire.is_open and way.has_room:
            payload, tracker = queue.popleft()
            self.network.send(wire, to, payload)
            if tracker is not None:
                tracker.done = True

    def _move_in(self, wire: Wire) -> None:
        way = wire.way_to(self)
        most = self._options.get(int(zmq.MAXMSGSIZE), -1)
        was_empty = not self._received
        while way.arrived and self._unread.get(wire, 0) < self._options.get(int(zmq.RCVHWM), 1000):
            payload = self.network.take(wire, way)
            if 0 <= most < len(payload):
                self.network.cut(wire)
                break
            parts = [wire.route, payload] if wire.router is self else [payload]
            self._received.append((wire, parts))
            self._unread[wire] = self._unread.get(wire, 0) + 1
        if was_empty and self._received and not self.closed:
            os.eventfd_write(self._event_fd, 1)

    # --- the caller's side

    def recv(self, flags: int = 0, copy: bool = True) -> Any:
        if not self._parts:
            if not self._received:
                raise zmq.Again
            wire, parts = self._received.popleft()
            host = user = ""
            if wire is not None:
                self._unread[wire] -= 1
                if way_has_more(wire, self):
                    self.context.wake()
                host, user = wire.dealer.host if wire.router is self else wire.router.host, wire.user
            self._parts.extend(SimFrame(part, host, user) for part in parts)
        frame = self._parts.popleft()
        frame.more = bool(self._parts)
        assert isinstance(frame, SimFrame)
        return frame.bytes if copy else frame

    def send(self, payload: bytes, flags: int = 0) -> None:
        if self.kind == int(zmq.ROUTER) and flags & _MORE:
            self._find(payload)  # raises where nobody has that route
            self._route_of_next = payload
            return
        route, self._route_of_next = self._route_of_next, None
        self._queue(route, payload, None)

    def send_multipart(
        self, parts: Iterable[bytes], flags: int = 0, copy: bool = True, track: bool = False
    ) -> SimTracker:
        tracker = SimTracker()
        if self.context.authenticator is self:
            _, _, _, number, status, _, user, _ = parts
            self._asked.pop(number)(user.decode() if status == b"200" else None)
            return tracker
        route, payload = parts
        self._queue(route, payload, tracker)
        return tracker

    def _find(self, route: bytes) -> Wire:
        if (wire := self._wires.get(bytes(route))) is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        return wire

    def _queue(self, route: bytes | None, payload: bytes, tracker: SimTracker | None) -> None:
        queue = self._outgoing[None if route is None else self._find(route)]
        if len(queue) >= self._options.get(int(zmq.SNDHWM), 1000):
            raise zmq.Again
        if route is None:
            self.network.on_request(self.process.name, self._address, bytes(payload))
        queue.append((bytes(payload), tracker))
        self.context.wake()


def _clear(event_fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(event_fd)


def way_has_more(wire: Wire, receiver: SimSocket) -> bool:
    """Whether messages wait in the receiver's kernel."""
    return bool(wire.way_to(receiver).arrived)


@cache
def public_of(secret: bytes) -> bytes:
    """Return the public half of a key."""
    return z85.decode(zmq.curve_public(z85.encode(secret)))


def _host_of(address: str) -> str:
    return address.removeprefix("tcp://").rpartition(":")[0]


class NoGuard:
    """`ConnectionGuard`, where no stranger connects."""

    def __init__(self, router: SimSocket, **_: object) -> None:
        self._router = router

    def start(self, port: int) -> None: ...

    def shut_all(self) -> None:
        self._router.shut_all()

    def count_message(self, fd: int) -> None: ...

    def queue_is_empty(self) -> None: ...

    def join(self) -> None: ...


def install(kernel: Kernel, network: Network, replace: Callable[[Any, str, object], None]) -> None:
    """Have the daemon's peer socket use this library."""
    from kvxferd.control import peer_socket

    SimContext.network = network
    replace(zmq, "Context", SimContext)
    replace(zmq, "Poller", SimPoller)
    replace(peer_socket, "ConnectionGuard", NoGuard)
