"""The peer socket: one ROUTER that others ask at, one DEALER to each peer that this node asks.

A thin shell: it owns ZMQ sockets and turns messages into events, nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import structlog
import zmq

from kvxferd.control import doorkeeper
from kvxferd.control.doorkeeper import Doorkeeper
from kvxferd.control.keys import PeerKey
from kvxferd.core.events import Event, PeerSaid, RouteSaid
from kvxferd.core.trust import Trust
from kvxferd.errors import Code, ConfigError, ProtocolError
from kvxferd.ids import Endpoint
from kvxferd.wire.codec import PEER_MESSAGES, encode, refuse_undecodable
from kvxferd.wire.common import Message
from kvxferd.wire.endpoint import address_of, key_of
from kvxferd.wire.limits import MAX_PEER_MESSAGE_BYTES

log = structlog.get_logger()

# Messages waiting for one peer. Questions are few (a handful per pull); one that is lost because
# its peer takes none is asked again, or given up by its own deadline.
HIGH_WATER = 10_000
MAX_PEERS = 16_384  # connected at a time; libzmq would stop at 1,023
MESSAGES_PER_TURN = 64  # then the loop's other sockets have theirs
# A dead peer's TCP connection is noticed in this time also where nothing is sent.
HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 6_000
RECONNECT_MAX_MS = 1_000


@dataclass(slots=True)
class _Watched:
    """A ZMQ socket and what it calls. Its descriptor is edge-triggered: see `_drain`."""

    socket: zmq.Socket[bytes]
    on_message: Callable[[list[bytes]], None]


class PeerSocket:
    """Bound while started. `on_event` gets every message, on the loop's thread."""

    def __init__(
        self,
        bind: str,
        on_event: Callable[[Event], None],
        trust: Trust | None = None,
        key: PeerKey | None = None,
    ) -> None:
        self._bind = bind
        self._on_event = on_event
        self._trust = trust or Trust()
        self._key = key
        self._doorkeeper: Doorkeeper | None = None
        self._door: _Watched | None = None
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_PEERS)
        self._router: _Watched | None = None
        self._dealers: dict[Endpoint, _Watched] = {}
        self.bound = ""  # what was bound, with its real port

    def start(self) -> None:
        """Bind. Raises ConfigError where the address cannot be had."""
        self._open_door()
        router = self._socket(zmq.ROUTER, self._bind)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._door is not None:
            router.setsockopt(zmq.ZAP_DOMAIN, doorkeeper.DOMAIN)
        if self._key is not None:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, self._key.secret)
        try:
            router.bind(self._bind)
        except zmq.ZMQError as error:
            router.close(linger=0)
            reason = error.strerror.partition(" (addr")[0]
            raise ConfigError(
                f"cannot bind peer.bind = {self._bind}: {reason}; another daemon may have it: "
                "give another port, or 0 for any free one"
            ) from error
        self.bound = router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._router = self._watch(router, self._routed)

    def _open_door(self) -> None:
        """Have libzmq ask who may connect, where anybody is to be turned away."""
        if self._key is None and not self._trust.networks:
            return
        self._doorkeeper = Doorkeeper(self._trust)
        asked = self._context.socket(zmq.ROUTER)
        asked.bind(doorkeeper.ENDPOINT)
        self._door = self._watch(asked, self._asked_at_the_door)

    def _asked_at_the_door(self, parts: list[bytes]) -> None:
        assert self._door is not None and self._doorkeeper is not None
        reply = self._doorkeeper.answer(parts, asyncio.get_running_loop().time())
        if reply is not None:
            with suppress(zmq.ZMQError):  # who asked has gone meanwhile
                self._door.socket.send_multipart(reply, zmq.NOBLOCK)
        self._later(self._door)

    def stop(self) -> None:
        """Close everything; what is queued has a moment to go out."""
        for watched in (*self._dealers.values(), self._router, self._door):
            if watched is not None:
                self._close(watched, linger_ms=200)
        self._dealers.clear()
        self._router = self._door = None
        self._context.term()

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.MAXMSGSIZE, MAX_PEER_MESSAGE_BYTES)
        made.setsockopt(zmq.SNDHWM, HIGH_WATER)
        made.setsockopt(zmq.RCVHWM, HIGH_WATER)
        made.setsockopt(zmq.IPV6, "[" in address)  # else IPv4 peers would get IPv4-in-IPv6 names
        made.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        made.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        return made

    def _watch(self, made: zmq.Socket[bytes], on_message: Callable[[list[bytes]], None]) -> _Watched:
        watched = _Watched(made, on_message)
        asyncio.get_running_loop().add_reader(_int_option(made, zmq.FD), self._drain, watched)
        self._later(watched)
        return watched

    def _close(self, watched: _Watched, linger_ms: int = 0) -> None:
        asyncio.get_running_loop().remove_reader(_int_option(watched.socket, zmq.FD))
        watched.socket.close(linger=linger_ms)

    # --- hearing

    def _later(self, watched: _Watched) -> None:
        asyncio.get_running_loop().call_soon(self._drain, watched)

    def _drain(self, watched: _Watched) -> None:
        """Take what is there. ZMQ's descriptor says "look again" once, so look until there is nothing."""
        for _ in range(MESSAGES_PER_TURN):
            if watched.socket.closed or not _int_option(watched.socket, zmq.EVENTS) & zmq.POLLIN:
                return
            try:
                parts = watched.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            watched.on_message(parts)
        self._later(watched)

    def _routed(self, parts: list[bytes]) -> None:
        route, *payload = parts
        try:
            self._on_event(RouteSaid(route, PEER_MESSAGES.decode(_only(payload))))
        except ProtocolError as error:
            log.warning(
                "peer message refused",
                limit_by=route.hex(),
                route=route.hex(),
                code=error.code,
                reason=error.message,
            )
            self.answer(route, refuse_undecodable(b"".join(payload), error))

    def _answered(self, endpoint: Endpoint, parts: list[bytes]) -> None:
        try:
            self._on_event(PeerSaid(endpoint, PEER_MESSAGES.decode(_only(parts))))
        except ProtocolError as error:
            log.warning(
                "peer message dropped",
                limit_by=endpoint,
                endpoint=endpoint,
                code=error.code,
                reason=error.message,
            )

    # --- saying

    def answer(self, route: bytes, message: Message) -> None:
        """Send back to whoever connected here. If they are gone, so is the message."""
        if self._router is None:
            return
        try:
            self._router.socket.send_multipart([route, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.debug("peer message not sent", route=route.hex(), reason=error.strerror)
        self._later(self._router)

    def send(self, endpoint: Endpoint, message: Message) -> None:
        """Send to a peer, connecting first where there is no connection."""
        watched = self._dealers.get(endpoint) or self._connect(endpoint)
        if watched is None:
            return
        try:
            watched.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.debug("peer message not sent", endpoint=endpoint, reason=error.strerror)
        # Sending may have eaten the edge that announced an arrival.
        self._later(watched)

    def _connect(self, endpoint: Endpoint) -> _Watched | None:
        try:
            dealer = self._socket(zmq.DEALER, endpoint)
        except zmq.ZMQError as error:
            log.warning("peer not connected", limit_by=endpoint, endpoint=endpoint, reason=error.strerror)
            return None
        try:
            if self._key is not None:
                dealer.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(key_of(endpoint)))
                dealer.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(self._key.public))
                dealer.setsockopt(zmq.CURVE_SECRETKEY, self._key.secret)
            dealer.connect(address_of(endpoint))
        except zmq.ZMQError as error:
            log.warning("peer not connected", limit_by=endpoint, endpoint=endpoint, reason=error.strerror)
            dealer.close(linger=0)
            return None
        watched = self._watch(dealer, lambda parts: self._answered(endpoint, parts))
        self._dealers[endpoint] = watched
        return watched

    def forget(self, endpoint: Endpoint) -> None:
        """Close the connection to a peer."""
        if watched := self._dealers.pop(endpoint, None):
            self._close(watched)


def _only(parts: list[bytes]) -> bytes:
    if len(parts) != 1:
        raise ProtocolError(f"cannot take a message of {len(parts)} parts: it has one", Code.BAD_FRAME)
    return parts[0]


def _int_option(of: zmq.Socket[bytes], option: int) -> int:
    value = of.getsockopt(option)
    assert isinstance(value, int)
    return value
