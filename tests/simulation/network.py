"""The simulated network between nodes: connections of messages as bytes, which stall, fill and break.

A connection is what libzmq makes of a DEALER that connects to a ROUTER's address. Each way keeps its order.
What was sent before a connection broke and has not arrived is lost; what the sender has queued since goes
over the next one.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import zmq

from tests.simulation.kernel import Kernel, Process

if TYPE_CHECKING:
    from tests.simulation.libzmq import SimSocket

_TYPE = re.compile(rb"\xa1t[\xa0-\xbf]([A-Za-z]+)")
_TRANSFER = re.compile(rb"transfer_id[\xa1-\xbf](t\d+)")

RECONNECT_S = 0.1
HANDSHAKE_S = 10.0  # `peer_socket.HANDSHAKE_MS`
MAX_UNREAD_BYTES = 4 << 20  # of one way: what the buffers of both kernels hold
UNACKNOWLEDGED_S = 6.0  # after which a kernel gives a connection up (`peer_socket.UNACKNOWLEDGED_MS`)


@dataclass(eq=False)
class Way:
    """One direction of a connection."""

    receiver: SimSocket
    wire: deque[tuple[float, bytes]] = field(default_factory=deque)  # arrival, payload
    arrived: deque[bytes] = field(default_factory=deque)  # in the receiver's kernel
    num_bytes: int = 0  # of both
    last_arrival: float = 0.0
    is_due: bool = False  # an arrival is scheduled

    @property
    def has_room(self) -> bool:
        """Whether the buffers take another message."""
        return self.num_bytes < MAX_UNREAD_BYTES


@dataclass(eq=False)
class Wire:
    """One connection, for as long as it lasts. `route`: its name at the router."""

    dealer: SimSocket
    router: SimSocket
    route: bytes
    to_router: Way
    to_dealer: Way
    user: str = ""  # as the router knows the dealer
    is_open: bool = True
    is_lent: bool = False  # to an address that another daemon has for a while

    def way_to(self, socket: SimSocket) -> Way:
        """Return the way that ends at that socket."""
        return self.to_router if socket is self.router else self.to_dealer


class Network:
    """Which nodes there are, what listens on them, and what goes wrong between them."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.listeners: dict[str, SimSocket] = {}  # by address
        self._tenants: dict[str, str] = {}  # by address: whose daemon answers there instead
        self.wires: list[Wire] = []
        self.latencies_s: tuple[float, ...] = (5e-5, 2e-4, 1e-3)
        self.on_send: Callable[[Wire, bytes], float | None] = lambda wire, payload: 0.0
        self.on_request: Callable[[str, str, bytes], None] = lambda sender, address, payload: None
        self.on_shut: Callable[[str], None] = lambda node: None
        self.change: Callable[[str, bytes], bytes] = lambda sender, payload: payload  # what a host says
        self._severed: dict[frozenset[str], float] = {}  # by both hosts: until when nothing passes
        self.on_strike: Callable[[str, str, float], None] = lambda one, other, seconds: None  # hosts
        self.tell: Callable[[str], None] = lambda what: None
        self._num_routes = 0

    # --- what goes wrong

    def sever(self, one: str, other: str, seconds: float) -> None:
        """Let nothing pass between two hosts for so long; connections break where it is too long."""
        until = self.kernel.now + seconds
        self._severed[frozenset((one, other))] = until
        self.on_strike(one, other, seconds)
        for wire in list(self.wires):
            if {wire.dealer.host, wire.router.host} == {one, other} and seconds > UNACKNOWLEDGED_S:
                self.kernel.at(self.kernel.now + UNACKNOWLEDGED_S, lambda wire=wire: self.cut(wire))

    def severed_until(self, wire: Wire) -> float:
        """Return until when nothing passes on a connection."""
        return self._severed.get(frozenset((wire.dealer.host, wire.router.host)), 0.0)

    def cut(self, wire: Wire) -> None:
        """Break a connection: what is on the way is lost. The dealer connects again."""
        if not wire.is_open:
            return
        wire.is_open = False
        self.tell(f"{wire.dealer.process.name} is cut off from {wire.router.process.name}")
        self.wires.remove(wire)
        self.on_strike(wire.dealer.host, wire.router.host, 0.0)
        for way in (wire.to_router, wire.to_dealer):
            way.wire.clear()
            way.arrived.clear()
        wire.router.disconnected(wire)
        wire.dealer.disconnected(wire)

    def lend_address(self, address: str, tenant: str) -> None:
        """Have the listener at another address answer at this one, where nobody does."""
        self._tenants[address] = tenant

    def give_back_addresses(self) -> None:
        """Have each listener answer at its own address alone."""
        self._tenants.clear()
        for wire in [wire for wire in self.wires if wire.is_lent]:
            self.cut(wire)

    def process_died(self, process: Process) -> None:
        """The kernel closes a dead process's sockets."""
        for address, listener in list(self.listeners.items()):
            if listener.process is process:
                del self.listeners[address]
        for wire in list(self.wires):
            if process in (wire.dealer.process, wire.router.process):
                self.cut(wire)

    # --- connections

    def connect(self, dealer: SimSocket, address: str) -> None:
        """Try to connect until it succeeds or the dealer is closed."""
        self.kernel.at(self.kernel.now + self._latency(), lambda: self._try_connect(dealer, address))

    def _try_connect(self, dealer: SimSocket, address: str) -> None:
        if dealer.closed or dealer.process.is_dead or dealer.wire is not None:
            return
        router = self.listeners.get(self._tenants.get(address, address))
        severed = (
            router is not None
            and self._severed.get(frozenset((dealer.host, router.host)), 0.0) > self.kernel.now
        )
        if router is None or severed or router.process.is_stopped or dealer.process.is_stopped:
            if router is None:
                dealer.refused(int(zmq.EVENT_CONNECT_RETRIED))
            self._retry(dealer, address)
        elif not dealer.speaks_with(router):
            dealer.refused(int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL))
            self._retry(dealer, address)
        else:
            self._shake_hands(dealer, address, router)

    def _retry(self, dealer: SimSocket, address: str) -> None:
        self.kernel.at(self.kernel.now + RECONNECT_S, lambda: self._try_connect(dealer, address))

    def _shake_hands(self, dealer: SimSocket, address: str, router: SimSocket) -> None:
        """Connect, if the router's authenticator admits the dealer."""
        is_over, lent_to = False, self._tenants.get(address)

        def replied(user: str | None) -> None:
            nonlocal is_over
            if is_over or dealer.closed or dealer.process.is_dead or self._tenants.get(address) != lent_to:
                return
            is_over = True
            if user is None:
                dealer.refused(int(zmq.EVENT_HANDSHAKE_FAILED_AUTH))
            else:
                self._connect(dealer, address, router, user)

        def look() -> None:
            """Try again where nobody replies, or is left to."""
            nonlocal is_over
            if is_over or dealer.closed or dealer.process.is_dead:
                return
            is_gone = router.closed or router.process.is_dead or self._tenants.get(address) != lent_to
            if not is_gone and self.kernel.now < began + HANDSHAKE_S:
                self.kernel.at(self.kernel.now + RECONNECT_S, look)
                return
            is_over = True
            dealer.refused(int(zmq.EVENT_CONNECT_RETRIED))
            self._retry(dealer, address)

        began = self.kernel.now
        router.ask_whether_admitted(dealer, replied)
        look()

    def _connect(self, dealer: SimSocket, address: str, router: SimSocket, user: str) -> None:
        self._num_routes += 1
        route = b"\0" + self._num_routes.to_bytes(4, "big")
        is_lent = address in self._tenants
        wire = Wire(dealer, router, route, Way(router), Way(dealer), user, is_lent=is_lent)
        self.wires.append(wire)
        self.tell(f"{dealer.process.name} is connected to {router.process.name}")
        router.connected(wire)
        dealer.connected(wire)

    # --- messages

    def send(self, wire: Wire, to: SimSocket, payload: bytes) -> None:
        """Put one message on its way."""
        way = wire.way_to(to)
        delay_s = self.on_send(wire, payload)
        if delay_s != 0.0:
            self.on_strike(wire.dealer.host, wire.router.host, delay_s or 0.0)
        sender = wire.dealer if to is wire.router else wire.router
        self.tell(f"{sender.process.name} sends {to.process.name} {name_of(payload)}")
        if delay_s is None:
            return  # lost, as where libzmq drops it
        payload = self.change(sender.host, payload)
        arrival = max(way.last_arrival, self.kernel.now + self._latency() + delay_s)
        way.last_arrival = arrival
        way.wire.append((arrival, payload))
        way.num_bytes += len(payload)
        self._schedule(wire, way)

    def _schedule(self, wire: Wire, way: Way) -> None:
        if way.wire and not way.is_due:
            way.is_due = True
            arrival = max(way.wire[0][0], self.severed_until(wire))
            self.kernel.at(arrival, lambda: self._arrive(wire, way))

    def _arrive(self, wire: Wire, way: Way) -> None:
        way.is_due = False
        if not wire.is_open:
            return
        if self.severed_until(wire) <= self.kernel.now:
            _, payload = way.wire.popleft()
            way.arrived.append(payload)
            way.receiver.wake_io_thread()
        self._schedule(wire, way)

    def take(self, wire: Wire, way: Way) -> bytes:
        """Take one message that has arrived, on its receiver's I/O thread."""
        payload = way.arrived.popleft()
        was_full = not way.has_room
        way.num_bytes -= len(payload)
        if was_full and way.has_room:
            sender = wire.dealer if way.receiver is wire.router else wire.router
            sender.wake_io_thread()
        return payload

    def _latency(self) -> float:
        return self.kernel.rng.choice(self.latencies_s)


def name_of(payload: bytes) -> str:
    """Return a message's name and its transfer, for people."""
    found, transfer = _TYPE.search(payload[:64]), _TRANSFER.search(payload)
    name = found[1].decode() if found else f"{len(payload)} bytes"
    return f"{name} {transfer[1].decode()}" if transfer else name
