"""The peer socket: one ROUTER that others ask at, one DEALER to each peer that this node asks.

A thin shell: it owns ZMQ sockets and turns messages into events, nothing else.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import structlog
import zmq

from kvxferd.control import doorkeeper
from kvxferd.control.connection_guard import ConnectionGuard
from kvxferd.control.doorkeeper import Doorkeeper
from kvxferd.control.keys import PeerKey
from kvxferd.control.peer_connections import shut_connections_to
from kvxferd.control.peer_inbox import Gate, OpenGate, PeerInbox, Sender
from kvxferd.control.resolver import Resolver, is_numeric
from kvxferd.control.unread_answers import MAX_SHORT_ANSWERS, MIN_TRACKED_BYTES, UnreadAnswers
from kvxferd.core.effects import NOBODY
from kvxferd.core.events import Event, PeerUnreachable
from kvxferd.core.trust import Trust
from kvxferd.errors import Code, ConfigError
from kvxferd.ids import Endpoint
from kvxferd.wire.codec import encode
from kvxferd.wire.common import BlockIds, Message
from kvxferd.wire.endpoint import address_of, host_of, key_of
from kvxferd.wire.limits import MAX_PEER_MESSAGE_BYTES, MAX_PEER_QUESTION_BYTES
from kvxferd.wire.peer import PeerRefused

log = structlog.get_logger()

# Messages waiting for one peer. Questions are few (a handful per pull); one that is lost because
# its peer takes none is asked again, or given up by its own deadline.
HIGH_WATER = 10_000
# Messages of one connection that libzmq reads ahead: 16 x 4 MiB while the loop is busy, of an admitted peer.
RECEIVE_HIGH_WATER = 16
HANDSHAKE_MS = 10_000  # three round trips, and one turn of this loop
SHUT_AGAIN_S = 0.2
BACKLOG = 512  # connections that wait to be accepted, in the kernel
MAX_PEERS = 16_384  # connected at a time; libzmq would stop at 1,023
# Then the loop's other sockets have theirs. One message takes a few ms at most (`wire/outlines.py`).
MESSAGES_PER_TURN, TURN_S = 64, 0.01
MAX_RESOLVING_MESSAGES = 1024  # for a peer whose name is being looked up; what is lost is asked again
# A dead peer's TCP connection is noticed in about this time, also where nothing is sent: by the kernel.
# Not by ZMQ's heartbeats: where a connection ends while its inbound queue is full, and the loop takes the
# queue later than the next heartbeat, libzmq 4.3.5 aborts the process (`!_io_error`, stream_engine_base.cpp).
KEEPALIVE_S, KEEPALIVE_PROBES = 2, 3
UNACKNOWLEDGED_MS = 6_000
RECONNECT_MAX_MS = 1_000
# As plain numbers: `value & zmq.POLLIN` takes 1.8 us and `zmq.NOBLOCK | zmq.SNDMORE` as much, these 0.1 us.
# `recv_multipart` and `send_multipart` compute with the others too, and take 4 and 3 us more.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_NOBLOCK, _NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK) | int(zmq.SNDMORE)
# libzmq's own names of connections: a zero and a number. A peer that chooses one may begin with a zero too.
ROUTE_BYTES, ROUTE_PREFIX = 5, b"\0"


@dataclass(slots=True)
class _Watched:
    """A ZMQ socket and what it calls. Its descriptor is edge-triggered: see `_drain`."""

    socket: zmq.Socket[bytes]
    on_message: Callable[[bytes, list[zmq.Frame]], None]  # the route ("" of a DEALER), and the parts
    has_routes: bool
    is_due: bool = False  # `_drain` runs, or is to run on the loop's next turn


class PeerSocket:
    """Bound while started. `on_event` gets every message, on the loop's thread."""

    def __init__(
        self,
        bind: str,
        on_event: Callable[[Event], None],
        trust: Trust | None = None,
        key: PeerKey | None = None,
        gate: Callable[[], Gate] | None = None,
        resolver: Resolver | None = None,
    ) -> None:
        self._bind = bind
        self._on_event = on_event
        self._trust = trust or Trust()
        self._has_other_lists = False  # than when the connections there are were admitted
        self._key = key
        self._doorkeeper: Doorkeeper | None = None
        self._door: _Watched | None = None
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_PEERS)
        self._router: _Watched | None = None
        self._guard: ConnectionGuard | None = None
        self._inbox = PeerInbox(gate or OpenGate, on_event, self.answer, self._is_admitted)
        self._unread = UnreadAnswers()
        self._cut: dict[bytes, int] = {}  # routes on which a part of an answer was dropped, and which answer
        self._resolver = resolver or Resolver()
        self._resolving: dict[Endpoint, list[Message]] = {}
        self._dealers: dict[Endpoint, _Watched] = {}
        self.bound = ""  # what was bound, with its real port

    def start(self) -> None:
        """Bind. Raises ConfigError where the address cannot be had."""
        self._open_door()
        router = self._socket(zmq.ROUTER, self._bind)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_PEER_QUESTION_BYTES)
        router.setsockopt(zmq.SNDHWM, MAX_SHORT_ANSWERS)
        router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        router.setsockopt(zmq.BACKLOG, BACKLOG)
        router.copy_threshold = MIN_TRACKED_BYTES
        if self._door is not None:
            router.setsockopt(zmq.ZAP_DOMAIN, doorkeeper.DOMAIN)
        if self._key is not None:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, self._key.secret)
        guard = ConnectionGuard(router, has_curve=self._key is not None)
        guard.start()
        try:
            router.bind(self._bind)
        except zmq.ZMQError as error:
            router.close(linger=0)
            guard.stop()
            reason = error.strerror.partition(" (addr")[0]
            advice = (
                "another daemon may have it: give another port, or 0 for any free one"
                if error.errno == errno.EADDRINUSE
                else "give an address of this node, and a port that its user may bind"
            )
            raise ConfigError(f"cannot bind peer.bind = {self._bind}: {reason}; {advice}") from error
        self.bound = router.getsockopt_string(zmq.LAST_ENDPOINT)
        guard.bound_to(int(self.bound.rpartition(":")[2]))
        self._guard = guard
        self._router = self._watch(router, self._routed, has_routes=True)

    def _open_door(self) -> None:
        """Have libzmq ask who may connect: also where all may, since the allow-lists can be reloaded."""
        self._doorkeeper = Doorkeeper(self._trust)
        asked = self._context.socket(zmq.ROUTER)
        asked.bind(doorkeeper.ENDPOINT)
        self._door = self._watch(asked, self._asked_at_the_door, has_routes=True)

    def _asked_at_the_door(self, route: bytes, parts: list[zmq.Frame]) -> None:
        assert self._door is not None and self._doorkeeper is not None
        question = [route, *(part.bytes for part in parts)]
        reply = self._doorkeeper.answer(question, asyncio.get_running_loop().time())
        if reply is not None:
            with suppress(zmq.ZMQError):  # who asked has gone meanwhile
                self._door.socket.send_multipart(reply, zmq.NOBLOCK)
        self._later(self._door)

    def set_trust(self, trust: Trust) -> None:
        """Admit by these allow-lists from now on. Every message is held against them too."""
        self._trust = trust
        self._has_other_lists = True
        if self._doorkeeper is not None:
            self._doorkeeper.trust = trust

    def admit_anew(self) -> int | None:
        """Shut every connection to this node; who is still admitted connects again.

        Return how many peers had made; None: it is tried again later.
        """
        if self._router is None:
            return 0  # stopped
        try:
            num_shut = shut_connections_to(int(self.bound.rpartition(":")[2]))
        except OSError as error:
            # Their messages are refused meanwhile.
            log.warning("cannot shut peers' connections: tried again", reason=error.strerror)
            asyncio.get_running_loop().call_later(SHUT_AGAIN_S, self.admit_anew)
            return None
        log.info("peers' connections are admitted anew", connections=num_shut)
        return num_shut

    def _is_admitted(self, sender: Sender) -> bool:
        """Whether what comes from there is taken by the allow-lists of now.

        A connection that this node made is closed by the node, once its endpoint is not to be asked any more.
        """
        if not self._has_other_lists or sender.endpoint is not None:
            return True
        if self._key is not None and not self._trust.admits_key(sender.key):
            return False
        return self._trust.admits_address(sender.address)

    def stop_listening(self) -> None:
        """Take no more connections; those that are there stay."""
        if self._router is not None:
            with suppress(zmq.ZMQError):
                self._router.socket.unbind(self.bound)
            self._later(self._router)

    def stop(self) -> None:
        """Close everything; what is queued has a moment to go out."""
        self._resolver.stop()
        self._inbox.stop()
        for watched in (*self._dealers.values(), self._router, self._door):
            if watched is not None:
                self._close(watched, linger_ms=200)
        self._dealers.clear()
        self._router = self._door = None
        if self._guard is not None:
            self._guard.stop()
            self._guard = None
        self._context.term()

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDHWM, HIGH_WATER)
        made.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
        made.setsockopt(zmq.IPV6, "[" in address)  # else IPv4 peers would get IPv4-in-IPv6 names
        made.setsockopt(zmq.TCP_KEEPALIVE, 1)
        made.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
        made.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
        made.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
        made.setsockopt(zmq.TCP_MAXRT, UNACKNOWLEDGED_MS)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        return made

    def _watch(
        self,
        made: zmq.Socket[bytes],
        on_message: Callable[[bytes, list[zmq.Frame]], None],
        has_routes: bool = False,
    ) -> _Watched:
        watched = _Watched(made, on_message, has_routes)
        asyncio.get_running_loop().add_reader(_int_option(made, zmq.FD), self._drain, watched)
        self._later(watched)
        return watched

    def _close(self, watched: _Watched, linger_ms: int = 0) -> None:
        asyncio.get_running_loop().remove_reader(_int_option(watched.socket, zmq.FD))
        watched.socket.close(linger=linger_ms)

    # --- hearing

    def _later(self, watched: _Watched) -> None:
        """Look again on the next turn. Once: each answer of a turn asks, and a look may take `TURN_S`.

        Not while `_drain` runs: it looks again itself.
        """
        if not watched.is_due:
            watched.is_due = True
            asyncio.get_running_loop().call_soon(self._drain, watched)

    def _drain(self, watched: _Watched) -> None:
        """Take what is there. ZMQ's descriptor says "look again" once, so look until there is nothing."""
        watched.is_due = True
        is_more = False
        try:
            is_more = self._take_some(watched)
        finally:
            watched.is_due = False
        if is_more:
            self._later(watched)

    def _take_some(self, watched: _Watched) -> bool:
        """Take the messages of one turn. Return whether more may be there.

        libzmq takes one message of each connection in turn.
        """
        socket = watched.socket
        until = time.monotonic() + TURN_S
        for _ in range(MESSAGES_PER_TURN):
            if socket.closed or not _int_option(socket, _EVENTS) & _POLLIN:
                return False
            try:
                route, parts = _receive(socket, watched.has_routes)
            except zmq.Again:
                return False
            try:
                watched.on_message(route, parts)
            except Exception:  # one sender's message must not keep the others' from being read
                log.exception("cannot take a message", limit_by="peer socket")
            if time.monotonic() > until:
                break
        return True

    def _routed(self, route: bytes, parts: list[zmq.Frame]) -> None:
        last = parts[-1]
        # Without CURVE it is what the peer itself has sent.
        key = _property(last, b"User-Id") if self._key is not None else ""
        sender = Sender(route, None, key, _property(last, b"Peer-Address"))
        if not self._is_admitted(sender):
            return  # it was read before its connection was shut
        # libzmq lets a peer choose its route. One that chooses a former peer's would have that one's answers.
        # A name that looks like libzmq's own is seen by whose it was.
        is_own = len(route) == ROUTE_BYTES and route.startswith(ROUTE_PREFIX)
        if not is_own or not self._unread.came(route, sender.peer):
            self._refuse(route, "it chose the name of its own connection")
            return
        if len(parts) != 1:
            self._refuse(route, f"a message of {len(parts)} parts; it has one")
            return
        self._inbox.take(sender, last.bytes)

    def _refuse(self, route: bytes, reason: str) -> None:
        log.warning("peer message refused", limit_by=route.hex(), route=route.hex(), reason=reason)
        self.answer(
            route, PeerRefused(request=0, code=Code.BAD_FRAME, message=f"cannot take a message: {reason}")
        )

    def _answered(self, endpoint: Endpoint, _: bytes, parts: list[zmq.Frame]) -> None:
        if len(parts) != 1:
            log.warning("peer message dropped", limit_by=endpoint, endpoint=endpoint, parts=len(parts))
            return
        self._inbox.take(Sender(endpoint=endpoint), parts[0].bytes)

    # --- saying

    def answer(self, route: bytes, message: Message) -> None:
        """Send back to whoever connected here. If they are gone, or do not read, so is the message."""
        if self._router is None or self._is_cut(route, message):
            return
        if not self._unread.has_room(route) or not self._send_back(self._router, route, encode(message)):
            log.debug("peer message not sent", route=route.hex(), reason="too much waits to be read there")
            if isinstance(message, BlockIds):
                self._cut[route] = message.stream
        self._later(self._router)

    def _send_back(self, router: _Watched, route: bytes, payload: bytes) -> bool:
        """Whether libzmq took it, or nobody is there."""
        if not self._unread.has_room(route, len(payload)):
            return False
        try:
            if len(payload) < MIN_TRACKED_BYTES:
                router.socket.send(route, _NOBLOCK_MORE)
                router.socket.send(payload, _NOBLOCK)
                return True
            tracker = router.socket.send_multipart([route, payload], zmq.NOBLOCK, copy=False, track=True)
        except zmq.ZMQError as error:
            return error.errno != zmq.EAGAIN
        assert tracker is not None
        self._unread.sent(route, tracker, len(payload))
        return True

    def _is_cut(self, route: bytes, message: Message) -> bool:
        """Whether an earlier part of the same answer was dropped: half an answer breaks the protocol."""
        if (cut := self._cut.get(route)) is None or cut != getattr(message, "stream", 0):
            return False
        if not isinstance(message, BlockIds):
            del self._cut[route]  # the end of that answer
        return True

    def send(self, endpoint: Endpoint, message: Message, uid: int = NOBODY) -> None:
        """Send to a peer for that user, connecting first where there is no connection."""
        watched = self._dealers.get(endpoint)
        if watched is not None:
            self._send_to(watched, endpoint, message)
        elif (waiting := self._resolving.get(endpoint)) is not None:
            if len(waiting) < MAX_RESOLVING_MESSAGES:
                waiting.append(message)
        elif is_numeric(host := host_of(endpoint)):
            self._connect_and_send(endpoint, host, [message])
        else:
            waiting = self._resolving[endpoint] = [message]
            self._resolver.resolve(
                host, lambda address, reason: self._resolved(endpoint, waiting, address, reason), uid
            )

    def _resolved(self, endpoint: Endpoint, waiting: list[Message], address: str, reason: str) -> None:
        if self._resolving.get(endpoint) is not waiting:
            return  # forgotten meanwhile
        del self._resolving[endpoint]
        if address:
            self._connect_and_send(endpoint, address, waiting)
        else:
            log.warning("peer not connected", limit_by=endpoint, endpoint=endpoint, reason=reason)
            self._on_event(PeerUnreachable(endpoint, reason))

    def _connect_and_send(self, endpoint: Endpoint, host: str, messages: list[Message]) -> None:
        if watched := self._connect(endpoint, host):
            for message in messages:
                self._send_to(watched, endpoint, message)

    def _send_to(self, watched: _Watched, endpoint: Endpoint, message: Message) -> None:
        try:
            watched.socket.send(encode(message), _NOBLOCK)
        except zmq.ZMQError as error:
            log.debug("peer message not sent", endpoint=endpoint, reason=error.strerror)
        # Sending may have eaten the edge that announced an arrival.
        self._later(watched)

    def _connect(self, endpoint: Endpoint, host: str) -> _Watched | None:
        """Connect to the endpoint's daemon at a numeric address."""
        port = address_of(endpoint).rpartition(":")[2]
        address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        try:
            dealer = self._socket(zmq.DEALER, address)
        except zmq.ZMQError as error:
            log.warning("peer not connected", limit_by=endpoint, endpoint=endpoint, reason=error.strerror)
            return None
        try:
            dealer.setsockopt(zmq.MAXMSGSIZE, MAX_PEER_MESSAGE_BYTES)
            if self._key is not None:
                dealer.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(key_of(endpoint)))
                dealer.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(self._key.public))
                dealer.setsockopt(zmq.CURVE_SECRETKEY, self._key.secret)
            dealer.connect(address)
        except zmq.ZMQError as error:
            log.warning("peer not connected", limit_by=endpoint, endpoint=endpoint, reason=error.strerror)
            dealer.close(linger=0)
            return None
        watched = self._watch(dealer, partial(self._answered, endpoint))
        self._dealers[endpoint] = watched
        return watched

    def forget(self, endpoint: Endpoint) -> None:
        """Close the connection to a peer."""
        self._resolving.pop(endpoint, None)
        if watched := self._dealers.pop(endpoint, None):
            self._close(watched)


def _receive(socket: zmq.Socket[bytes], has_routes: bool) -> tuple[bytes, list[zmq.Frame]]:
    """Return one message: its route, and its other parts. Raises zmq.Again where there is none."""
    route = socket.recv(_NOBLOCK) if has_routes else b""
    part = socket.recv(_NOBLOCK, copy=False)
    parts = [part]
    while part.more:
        part = socket.recv(_NOBLOCK, copy=False)
        parts.append(part)
    return route, parts


def _property(frame: zmq.Frame, name: bytes) -> str:
    """What libzmq knows about the connection on which the message came; "" where it knows nothing."""
    try:
        found = frame.get(name)
    except zmq.ZMQError:
        return ""
    return found if isinstance(found, str) else ""


def _int_option(of: zmq.Socket[bytes], option: int) -> int:
    value = of.getsockopt(option)
    assert isinstance(value, int)
    return value
