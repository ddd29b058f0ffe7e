"""Requests to other daemons, and replies by the route of who asked, over real connections."""

from __future__ import annotations

import errno
import ipaddress
from collections.abc import Callable

import pytest
import zmq

from kvxferd.control.peer_socket import PeerSocket
from kvxferd.core import events as ev
from kvxferd.core.allowlist import PeerAllowlist
from kvxferd.errors import ConfigError
from kvxferd.ids import Endpoint, GrantId
from kvxferd.wire.peer import ReleaseGrant
from tests.support.peer_socket_harness import ListeningPeer, NoChecks

Start = Callable[..., ListeningPeer]


def requests(daemon: ListeningPeer) -> list[tuple[bytes, int]]:
    """Return the routes and numbers of those that it was asked."""
    return [(event.route, event.message.request) for event in daemon.of(ev.PeerRequest)]


def replies(daemon: ListeningPeer) -> list[tuple[str, int]]:
    return [(event.endpoint, event.message.request) for event in daemon.of(ev.PeerReply)]


def connections(daemon: ListeningPeer) -> list[ev.Event]:
    return daemon.of(ev.PeerConnected, ev.PeerDisconnected)


def question(number: int) -> ReleaseGrant:
    return ReleaseGrant(request=number, grant=GrantId("g"))


async def test_a_daemon_without_descriptors_says_why_it_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = PeerSocket("tcp://127.0.0.1:0", lambda event: None, NoChecks)

    def none_left(context: zmq.Context, kind: int) -> zmq.Socket:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(zmq.Context, "socket", none_left)
    with pytest.raises(ConfigError, match="Too many open files; raise the limit"):
        peers.start()
    peers.stop()


async def test_replies_go_to_who_asked_until_it_disconnects(start_peer: Start) -> None:
    here, there = start_peer(), start_peer()
    for number in range(5):
        here.socket.send(there.address, question(number))
    await there.until(lambda: len(requests(there)) == 5)
    assert [number for _, number in requests(there)] == list(range(5))
    (old_route,) = {route for route, _ in requests(there)}
    there.socket.reply(old_route, question(10))
    await here.until(lambda: bool(replies(here)))
    here.socket.disconnect(there.address)
    here.socket.send(there.address, question(6))
    await there.until(lambda: len(requests(there)) == 6)
    new_route, _ = requests(there)[-1]
    assert new_route != old_route
    there.socket.reply(old_route, question(11))
    there.socket.reply(new_route, question(12))
    await here.until(lambda: len(replies(here)) == 2)
    assert replies(here) == [(there.address, 10), (there.address, 12)]


async def test_a_request_to_a_daemon_that_is_away_waits_for_the_next_at_its_address(
    start_peer: Start,
) -> None:
    here, there = start_peer(), start_peer()
    here.socket.send(there.address, question(1))
    await there.until(lambda: bool(requests(there)))
    there.stop()
    here.socket.send(there.address, question(3))
    here.socket.disconnect(there.address)  # which drops it
    here.socket.send(there.address, question(2))
    again = start_peer(there.address)
    await again.until(lambda: bool(requests(again)))
    ((route, number),) = requests(again)
    assert number == 2
    again.socket.reply(route, question(4))
    await here.until(lambda: bool(replies(here)))


# --- how connections come and go


async def test_a_peer_that_does_not_listen_is_reported_and_again_once_it_does(
    start_peer: Start,
) -> None:
    asking, answering = start_peer(), start_peer()
    address = answering.address
    answering.stop()
    asking.socket.send(address, question(1))
    await asking.until(lambda: bool(connections(asking)))
    assert connections(asking)[0] == ev.PeerDisconnected(address, "it accepts no connection there")
    start_peer(address)
    await asking.until(lambda: ev.PeerConnected(address) in connections(asking))


async def test_a_peer_that_dies_is_reported(start_peer: Start) -> None:
    asking, answering = start_peer(), start_peer()
    asking.socket.send(answering.address, question(1))
    await answering.until(lambda: bool(requests(answering)))
    answering.stop()
    gone = ev.PeerDisconnected(answering.address, "it has closed the connection")
    await asking.until(lambda: gone in connections(asking))
    assert connections(asking)[0] == ev.PeerConnected(answering.address)


async def test_a_peer_that_admits_this_node_later_is_reached(start_peer: Start) -> None:
    """libzmq makes no other connection behind a handshake that was refused."""
    nobody = PeerAllowlist(networks=(ipaddress.ip_network("10.9.0.0/16"),))
    asking, answering = start_peer(), start_peer(allowlist=nobody)
    asking.socket.send(answering.address, question(1))
    refused = ev.PeerDisconnected(answering.address, "it does not admit this node")
    await asking.until(lambda: refused in connections(asking))
    answering.socket.set_allowlist(PeerAllowlist())
    asking.socket.send(answering.address, question(2))
    await answering.until(lambda: bool(requests(answering)))
    assert [number for _, number in requests(answering)] == [2]


async def test_what_this_node_disconnects_is_not_reported_and_leaves_nothing(
    start_peer: Start,
) -> None:
    asking, answering = start_peer(), start_peer()
    asking.socket.send(answering.address, question(1))
    await answering.until(lambda: bool(requests(answering)))
    num_before = len(connections(asking))
    asking.socket.disconnect(answering.address)
    asking.stop()
    assert not asking.socket._reports._monitors
    assert len(connections(asking)) == num_before


async def test_a_node_with_many_peers_that_do_not_listen_stops(start_peer: Start) -> None:
    """libzmq waits for whoever reads what it reports, also when it closes."""
    asking = start_peer()
    for port in range(1, 201):
        asking.socket.send(Endpoint(f"tcp://127.0.0.1:{port}"), question(port))
    await asking.until(lambda: len(connections(asking)) >= 200)
    asking.stop()
    assert not asking.socket._reports._monitors
