"""The peer socket: one ROUTER for peers' requests, and one DEALER to each peer that this node connects to.

A thin shell: it owns ZMQ sockets and turns messages into events, nothing else.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import structlog
import zmq

from kvxferd.control import zap
from kvxferd.control.connection_guard import ConnectionGuard
from kvxferd.control.connection_reports import ConnectionReport, ConnectionReports
from kvxferd.control.curve_keys import CurveKeyPair
from kvxferd.control.peer_inbox import PeerInbox, Sender
from kvxferd.control.resolver import Resolver, is_numeric
from kvxferd.control.turns import Turns
from kvxferd.control.unread_replies import MAX_SHORT_REPLIES, MIN_TRACKED_BYTES, UnreadReplies
from kvxferd.control.watched_socket import WatchedSocket
from kvxferd.control.zap import ZapAuthenticator
from kvxferd.core.allowlist import PeerAllowlist
from kvxferd.core.effects import NO_USER
from kvxferd.core.events import Event, PeerConnected, PeerDisconnected, PeerUnreachable
from kvxferd.core.node import Node
from kvxferd.errors import Code, ConfigError
from kvxferd.ids import Endpoint
from kvxferd.wire.codec import encode
from kvxferd.wire.common import Message
from kvxferd.wire.endpoint import address_of, host_of, key_of
from kvxferd.wire.limits import MAX_PEER_MESSAGE_BYTES, MAX_PEER_REQUEST_BYTES
from kvxferd.wire.peer import PeerRefused

log = structlog.get_logger()

# Messages queued to one peer. Requests are few (a handful per pull); one that is lost because its peer reads
# none is sent again, or given up at its deadline.
SEND_HIGH_WATER = 10_000
# Messages of one connection that libzmq reads ahead: 16 x 4 MiB while the loop is busy, of an admitted peer.
RECEIVE_HIGH_WATER = 16
HANDSHAKE_MS = 10_000  # a handshake takes three round trips and one turn of this loop
BACKLOG = 512  # connections in the kernel that wait to be accepted
MAX_ZMQ_SOCKETS = 16_384  # at a time; libzmq's default is 1,023
MAX_RESOLVING_MESSAGES = 1024  # to a peer whose name is being resolved; lost ones are sent again
# The kernel detects a dead peer's TCP connection in about this time, also if nothing is sent. Not ZMQ's
# heartbeats: if a connection ends while its inbound queue is full, and the loop reads the queue later than
# the next heartbeat, libzmq 4.3.5 aborts the process (`!_io_error`, stream_engine_base.cpp).
KEEPALIVE_S, KEEPALIVE_PROBES = 2, 3
UNACKNOWLEDGED_MS = 6_000
RECONNECT_MAX_MS = 1_000
# Plain integers: `zmq.NOBLOCK | zmq.SNDMORE` takes 1.8 us, these 0.1 us. `send_multipart` uses the enums too,
# and takes 3 us more.
_NOBLOCK, _NOBLOCK_MORE, _SRCFD = int(zmq.NOBLOCK), int(zmq.NOBLOCK) | int(zmq.SNDMORE), int(zmq.SRCFD)
# A routing id that libzmq generates: a zero and a number. One that a peer chooses may start with a zero too.
ROUTE_BYTES, ROUTE_PREFIX = 5, b"\0"


class PeerSocket:
    """Bound while started. `on_event` gets every message, on the loop's thread."""

    def __init__(
        self,
        bind: str,
        on_event: Callable[[Event], None],
        node: Callable[[], Node],
        allowlist: PeerAllowlist | None = None,
        key: CurveKeyPair | None = None,
        resolver: Resolver | None = None,
        turns: Turns | None = None,
    ) -> None:
        """`turns`: shared with the workers' socket; None: its own."""
        self._bind = bind
        self._on_event = on_event
        self._allowlist = allowlist or PeerAllowlist()
        self._is_allowlist_reloaded = False  # since the present connections were admitted
        self._key = key
        # libzmq asks it even if all may connect: the allow-lists can be reloaded.
        self.authenticator = ZapAuthenticator(self._allowlist)
        self._zap_socket: WatchedSocket | None = None
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_ZMQ_SOCKETS)
        self._router: WatchedSocket | None = None
        self._guard: ConnectionGuard | None = None
        self._inbox = PeerInbox(node, on_event, self.reply, self._is_admitted)
        self._unread_replies = UnreadReplies()
        self._resolver = resolver or Resolver()
        self._turns = turns or Turns()
        self._resolving: dict[Endpoint, list[Message]] = {}
        self._dealers: dict[Endpoint, WatchedSocket] = {}
        self._reports = ConnectionReports(self._context, self._turns)
        self.bound_endpoint = ""  # with the real port

    def start(self) -> None:
        """Bind. Raises ConfigError if the address cannot be bound, or no sockets can be had."""
        try:
            self._start_zap()
            router = self._make_socket(zmq.ROUTER, self._bind)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot open the peer socket: {error.strerror}; raise the limit on open files, or free some"
            ) from error
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_PEER_REQUEST_BYTES)
        router.setsockopt(zmq.SNDHWM, MAX_SHORT_REPLIES)
        router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        router.setsockopt(zmq.BACKLOG, BACKLOG)
        router.copy_threshold = MIN_TRACKED_BYTES
        if self._zap_socket is not None:
            router.setsockopt(zmq.ZAP_DOMAIN, zap.DOMAIN)
        if self._key is not None:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, self._key.secret)
        guard = ConnectionGuard(
            router,
            has_curve=self._key is not None,
            request_read=partial(self._request_read, asyncio.get_running_loop()),
        )
        try:
            router.bind(self._bind)
        except zmq.ZMQError as error:
            router.close(linger=0)
            guard.close()
            reason = error.strerror.partition(" (addr")[0]
            advice = (
                "another daemon may have it: give another port, or 0 for any free one"
                if error.errno == errno.EADDRINUSE
                else "give an address of this node, and a port that its user may bind"
            )
            raise ConfigError(f"cannot bind peer.bind = {self._bind}: {reason}; {advice}") from error
        self.bound_endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        try:
            guard.start(int(self.bound_endpoint.rpartition(":")[2]))
        except ConfigError:
            router.close(linger=0)
            raise
        self._guard = guard
        self._router = WatchedSocket(
            router, self._turns, self._on_request, has_routes=True, on_empty=guard.queue_is_empty
        )

    def _request_read(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have requests read that wait. From any thread."""
        if (router := self._router) is not None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(router.schedule_read)

    def _start_zap(self) -> None:
        """Have libzmq send ZAP requests."""
        zap_socket = self._context.socket(zmq.ROUTER)
        zap_socket.bind(zap.ENDPOINT)
        self._zap_socket = WatchedSocket(zap_socket, self._turns, self._on_zap_request, has_routes=True)

    def _on_zap_request(self, route: bytes, parts: list[zmq.Frame]) -> None:
        assert self._zap_socket is not None
        request = [route, *(part.bytes for part in parts)]
        reply = self.authenticator.reply(request)
        if reply is not None:
            with suppress(zmq.ZMQError):  # the connection has closed meanwhile
                self._zap_socket.socket.send_multipart(reply, zmq.NOBLOCK)
        self._zap_socket.schedule_read()

    def set_allowlist(self, allowlist: PeerAllowlist) -> None:
        """Admit by these allow-lists from now on. Every message is checked against them too."""
        self._allowlist = allowlist
        self._is_allowlist_reloaded = True
        self.authenticator.allowlist = allowlist

    def shut_connections(self) -> None:
        """Have every connection to this node shut; peers that are still admitted connect again.

        Messages of peers that are not admitted are refused meanwhile.
        """
        if self._guard is not None:  # else it is stopped
            self._guard.shut_all()

    def _is_admitted(self, sender: Sender) -> bool:
        """Whether the current allow-lists admit the sender.

        A connection that this node made is closed by the node, once its endpoint is no longer admitted.
        """
        if not self._is_allowlist_reloaded or sender.endpoint is not None:
            return True
        if self._key is not None and not self._allowlist.allows_key(sender.key):
            return False
        return self._allowlist.allows_address(sender.address)

    def stop_listening(self) -> None:
        """Accept no more connections; open ones stay."""
        if self._router is not None:
            with suppress(zmq.ZMQError):
                self._router.socket.unbind(self.bound_endpoint)
            self._router.schedule_read()

    def stop(self) -> None:
        """Close everything; queued messages have a short time to be sent."""
        self._resolver.close()
        self._inbox.close()
        for watched in (*self._dealers.values(), self._router, self._zap_socket):
            if watched is not None:
                watched.close(linger_ms=200)
        self._dealers.clear()
        self._router = self._zap_socket = None
        self._reports.read_rest()
        if self._guard is not None:
            self._guard.join()
            self._guard = None
        self._context.term()

    def _make_socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        zmq_socket: zmq.Socket[bytes] = self._context.socket(kind)
        zmq_socket.setsockopt(zmq.LINGER, 0)
        zmq_socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
        zmq_socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
        zmq_socket.setsockopt(zmq.IPV6, "[" in address)  # else IPv4 peers would have IPv4-mapped addresses
        zmq_socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        zmq_socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
        zmq_socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
        zmq_socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
        zmq_socket.setsockopt(zmq.TCP_MAXRT, UNACKNOWLEDGED_MS)
        zmq_socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        return zmq_socket

    # --- receiving

    def _on_request(self, route: bytes, parts: list[zmq.Frame]) -> None:
        last = parts[-1]
        if self._guard is not None:
            self._guard.count_message(last.get(_SRCFD))
        # Without CURVE this is unauthenticated: the peer itself has sent it.
        key = _zmq_metadata(last, b"User-Id") if self._key is not None else ""
        sender = Sender(route, None, key, _zmq_metadata(last, b"Peer-Address"))
        if not self._is_admitted(sender):
            return  # it was read before its connection was shut
        # libzmq lets a peer choose its route. With a former peer's route it would get that one's replies. A
        # route that looks like libzmq's own is checked by its former owner.
        is_own = len(route) == ROUTE_BYTES and route.startswith(ROUTE_PREFIX)
        if not is_own or not self._unread_replies.claim_route(route, sender.peer):
            self._refuse(route, "it chose the name of its own connection")
            return
        if len(parts) != 1:
            self._refuse(route, "a message of several parts; it has one")
            return
        self._inbox.handle(sender, last.bytes)

    def _refuse(self, route: bytes, reason: str) -> None:
        log.warning("peer message refused", limit_by=route.hex(), route=route.hex(), reason=reason)
        self.reply(
            route, PeerRefused(request=0, code=Code.BAD_FRAME, message=f"cannot take a message: {reason}")
        )

    def _on_reply(self, endpoint: Endpoint, _: bytes, parts: list[zmq.Frame]) -> None:
        if len(parts) != 1:
            log.warning("peer message dropped", limit_by=endpoint, endpoint=endpoint, parts=len(parts))
            return
        self._inbox.handle(Sender(endpoint=endpoint), parts[0].bytes)

    # --- sending

    def reply(self, route: bytes, message: Message) -> None:
        """Send to a peer that connected here. Drop the message if the peer is gone or does not read."""
        if self._router is None:
            return
        if not self._unread_replies.has_room(route) or not self._send_reply(
            self._router, route, encode(message)
        ):
            log.debug("peer message not sent", route=route.hex(), reason="too much waits to be read there")
        self._router.schedule_read()

    def _send_reply(self, router: WatchedSocket, route: bytes, payload: bytes) -> bool:
        """Send one payload. True: libzmq took it, or the peer is gone."""
        if not self._unread_replies.has_room(route, len(payload)):
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
        self._unread_replies.add(route, tracker, len(payload))
        return True

    def send(self, endpoint: Endpoint, message: Message, uid: int = NO_USER) -> None:
        """Send to a peer for that user, and connect first if there is no connection."""
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
                host, lambda address, reason: self._on_resolved(endpoint, waiting, address, reason), uid
            )

    def _on_resolved(self, endpoint: Endpoint, waiting: list[Message], address: str, reason: str) -> None:
        if self._resolving.get(endpoint) is not waiting:
            return  # disconnected meanwhile
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

    def _send_to(self, watched: WatchedSocket, endpoint: Endpoint, message: Message) -> None:
        try:
            watched.socket.send(encode(message), _NOBLOCK)
        except zmq.ZMQError as error:
            log.debug("peer message not sent", endpoint=endpoint, reason=error.strerror)
        # Sending may have consumed the edge that signals an arrival.
        watched.schedule_read()

    def _connect(self, endpoint: Endpoint, host: str) -> WatchedSocket | None:
        """Connect to the endpoint's daemon at a numeric address."""
        port = address_of(endpoint).rpartition(":")[2]
        address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        try:
            dealer = self._make_socket(zmq.DEALER, address)
        except zmq.ZMQError as error:
            log.warning("peer not connected", limit_by=endpoint, endpoint=endpoint, reason=error.strerror)
            return None
        try:
            dealer.setsockopt(zmq.MAXMSGSIZE, MAX_PEER_MESSAGE_BYTES)
            if self._key is not None:
                dealer.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(key_of(endpoint)))
                dealer.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(self._key.public))
                dealer.setsockopt(zmq.CURVE_SECRETKEY, self._key.secret)
            self._reports.follow(dealer, partial(self._on_report, endpoint, dealer))
            dealer.connect(address)
        except zmq.ZMQError as error:
            log.warning("peer not connected", limit_by=endpoint, endpoint=endpoint, reason=error.strerror)
            dealer.close(linger=0)
            return None
        watched = WatchedSocket(dealer, self._turns, partial(self._on_reply, endpoint))
        self._dealers[endpoint] = watched
        return watched

    def _on_report(self, endpoint: Endpoint, dealer: zmq.Socket[bytes], report: ConnectionReport) -> None:
        if (watched := self._dealers.get(endpoint)) is None or watched.socket is not dealer:
            return  # disconnected meanwhile
        if report.is_final:
            self.disconnect(endpoint)  # what is sent next connects anew
        self._on_event(PeerDisconnected(endpoint, report.ended) if report.ended else PeerConnected(endpoint))

    def disconnect(self, endpoint: Endpoint) -> None:
        """Close the connection to a peer."""
        self._resolving.pop(endpoint, None)
        if watched := self._dealers.pop(endpoint, None):
            watched.close()


def _zmq_metadata(frame: zmq.Frame, name: bytes) -> str:
    """Return libzmq's metadata of the connection on which the message came; "" if it has none."""
    try:
        found = frame.get(name)
    except zmq.ZMQError:
        return ""
    return found if isinstance(found, str) else ""
