"""Requests to other daemons, and replies by the route of who asked, over real connections."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
from collections.abc import AsyncIterator, Callable

import pytest
import zmq

from kvxferd.control.peer_socket import PeerSocket
from kvxferd.core import events as ev
from kvxferd.core.allowlist import PeerAllowlist
from kvxferd.errors import ConfigError
from kvxferd.ids import Endpoint, GrantId
from kvxferd.wire.peer import ReleaseGrant
from tests.support.early_checks import NoChecks

LIMIT_S = 30.0


class Daemon:
    """A peer socket, with what it has received."""

    def __init__(self, address: str = "tcp://127.0.0.1:0", allowlist: PeerAllowlist | None = None) -> None:
        self.requests: list[tuple[bytes, int]] = []  # routes and numbers
        self.replies: list[tuple[str, int]] = []
        self.connections: list[ev.PeerConnected | ev.PeerDisconnected] = []
        self.is_stopped = False
        self._changed = asyncio.Event()
        self.socket = PeerSocket(address, self._on_event, NoChecks, allowlist)
        self.socket.start()
        self.address = Endpoint(self.socket.bound_endpoint)

    def _on_event(self, event: ev.Event) -> None:
        match event:
            case ev.PeerRequest(message=ReleaseGrant(request=number)):
                self.requests.append((event.route, number))
            case ev.PeerReply(message=ReleaseGrant(request=number)):
                self.replies.append((event.endpoint, number))
            case ev.PeerConnected() | ev.PeerDisconnected():
                self.connections.append(event)
        self._changed.set()

    def stop(self) -> None:
        if not self.is_stopped:
            self.is_stopped = True
            self.socket.stop()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not holds():
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Daemon]]:
    daemons: list[Daemon] = []

    def make(*address: str, allowlist: PeerAllowlist | None = None) -> Daemon:
        daemons.append(Daemon(*address, allowlist=allowlist))
        return daemons[-1]

    yield make
    for daemon in daemons:
        daemon.stop()


def question(number: int) -> ReleaseGrant:
    return ReleaseGrant(request=number, grant=GrantId("g"))


async def test_a_daemon_without_descriptors_says_why_it_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    socket = PeerSocket("tcp://127.0.0.1:0", lambda event: None, NoChecks)

    def none_left(context: zmq.Context, kind: int) -> zmq.Socket:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(zmq.Context, "socket", none_left)
    with pytest.raises(ConfigError, match="Too many open files; raise the limit"):
        socket.start()
    socket.stop()


async def test_replies_go_to_who_asked_until_it_disconnects(start: Callable[..., Daemon]) -> None:
    here, there = start(), start()
    for number in range(5):
        here.socket.send(there.address, question(number))
    await there.until(lambda: len(there.requests) == 5)
    assert [number for _, number in there.requests] == list(range(5))
    (old_route,) = {route for route, _ in there.requests}
    there.socket.reply(old_route, question(10))
    await here.until(lambda: bool(here.replies))
    here.socket.disconnect(there.address)
    here.socket.send(there.address, question(6))
    await there.until(lambda: len(there.requests) == 6)
    new_route, _ = there.requests[-1]
    assert new_route != old_route
    there.socket.reply(old_route, question(11))
    there.socket.reply(new_route, question(12))
    await here.until(lambda: len(here.replies) == 2)
    assert here.replies == [(there.address, 10), (there.address, 12)]


async def test_a_request_to_a_daemon_that_is_away_waits_for_the_next_at_its_address(
    start: Callable[..., Daemon],
) -> None:
    here, there = start(), start()
    here.socket.send(there.address, question(1))
    await there.until(lambda: bool(there.requests))
    there.stop()
    here.socket.send(there.address, question(3))
    here.socket.disconnect(there.address)  # which drops it
    here.socket.send(there.address, question(2))
    again = start(there.address)
    await again.until(lambda: bool(again.requests))
    ((route, number),) = again.requests
    assert number == 2
    again.socket.reply(route, question(4))
    await here.until(lambda: bool(here.replies))


# --- how connections come and go


async def test_a_peer_that_does_not_listen_is_reported_and_again_once_it_does(
    start: Callable[..., Daemon],
) -> None:
    asking, answering = start(), start()
    address = answering.address
    answering.stop()
    asking.socket.send(address, question(1))
    await asking.until(lambda: bool(asking.connections))
    assert asking.connections[0] == ev.PeerDisconnected(address, "it accepts no connection there")
    start(address)
    await asking.until(lambda: ev.PeerConnected(address) in asking.connections)


async def test_a_peer_that_dies_is_reported(start: Callable[..., Daemon]) -> None:
    asking, answering = start(), start()
    asking.socket.send(answering.address, question(1))
    await answering.until(lambda: bool(answering.requests))
    answering.stop()
    gone = ev.PeerDisconnected(answering.address, "it has closed the connection")
    await asking.until(lambda: gone in asking.connections)
    assert asking.connections[0] == ev.PeerConnected(answering.address)


async def test_a_peer_that_admits_this_node_later_is_reached(start: Callable[..., Daemon]) -> None:
    """libzmq makes no other connection behind a handshake that was refused."""
    nobody = PeerAllowlist(networks=(ipaddress.ip_network("10.9.0.0/16"),))
    asking, answering = start(), start(allowlist=nobody)
    asking.socket.send(answering.address, question(1))
    refused = ev.PeerDisconnected(answering.address, "it does not admit this node")
    await asking.until(lambda: refused in asking.connections)
    answering.socket.set_allowlist(PeerAllowlist())
    asking.socket.send(answering.address, question(2))
    await answering.until(lambda: bool(answering.requests))
    assert [number for _, number in answering.requests] == [2]


async def test_what_this_node_disconnects_is_not_reported_and_leaves_nothing(
    start: Callable[..., Daemon],
) -> None:
    asking, answering = start(), start()
    asking.socket.send(answering.address, question(1))
    await answering.until(lambda: bool(answering.requests))
    asking.connections.clear()
    asking.socket.disconnect(answering.address)
    asking.stop()
    assert not asking.socket._reports._monitors
    assert not asking.connections


async def test_a_node_with_many_peers_that_do_not_listen_stops(start: Callable[..., Daemon]) -> None:
    """libzmq waits for whoever reads what it reports, also when it closes."""
    asking = start()
    for port in range(1, 201):
        asking.socket.send(Endpoint(f"tcp://127.0.0.1:{port}"), question(port))
    await asking.until(lambda: len(asking.connections) >= 200)
    asking.stop()
    assert not asking.socket._reports._monitors
