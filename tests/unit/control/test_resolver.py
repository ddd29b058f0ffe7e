"""Host names are resolved beside libzmq: a name without an answer costs whoever asked for it."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from kvxferd.control.peer_socket import PeerSocket
from kvxferd.control.resolver import Resolver, is_numeric, system_lookup
from kvxferd.core import events as ev
from kvxferd.core.effects import NO_USER
from kvxferd.core.limits.ledger import FairShare
from kvxferd.ids import Endpoint
from kvxferd.wire.peer import PEER_VERSIONS, PeerHello
from tests.support.early_checks import NoChecks
from tests.support.peer_messages import Messages

REQUEST = PeerHello(request=1, versions=PEER_VERSIONS, boot="b", endpoint=Endpoint("tcp://x:1"))
Answers = asyncio.Queue[tuple[str, str]]


class Servers:
    """Name servers of which some answer only when they are let."""

    def __init__(self) -> None:
        self.addresses = {"peer": ["127.0.0.1"]}
        self.released = threading.Event()
        self.num_queries = 0

    def __call__(self, host: str) -> list[str]:
        self.num_queries += 1
        if host.startswith("silent"):
            self.released.wait(20)
        if host not in self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.addresses[host]


@pytest.fixture
def servers():
    made = Servers()
    yield made
    made.released.set()


async def reply_of(resolver: Resolver, host: str, uid: int = NO_USER) -> tuple[str, str]:
    replies = Answers()
    resolver.resolve(host, lambda address, reason: replies.put_nowait((address, reason)), uid)
    return await asyncio.wait_for(replies.get(), 10)


async def test_a_name_without_an_answer_keeps_no_other_waiting(servers):
    resolver = Resolver(servers, give_up_s=0.2)
    given_up = asyncio.ensure_future(reply_of(resolver, "silent"))
    assert await reply_of(resolver, "peer") == ("127.0.0.1", "")
    address, reason = await given_up
    assert not address
    assert "no name server answered" in reason


async def test_a_name_is_asked_for_once_at_a_time(servers):
    resolver = Resolver(servers, give_up_s=0.2)
    first, second = asyncio.ensure_future(reply_of(resolver, "silent")), reply_of(resolver, "silent")
    await asyncio.gather(first, second)
    await reply_of(resolver, "silent")  # its query is still there
    assert servers.num_queries == 1


async def test_a_name_that_moves_is_found_and_one_whose_server_is_away_is_where_it_was(servers):
    resolver = Resolver(servers)
    await reply_of(resolver, "peer")
    servers.addresses["peer"] = ["127.0.0.2"]
    assert await reply_of(resolver, "peer") == ("127.0.0.2", "")
    del servers.addresses["peer"]
    assert await reply_of(resolver, "peer") == ("127.0.0.2", "")


async def test_where_no_thread_can_be_had_the_name_has_no_address_and_is_asked_for_anew(servers, monkeypatch):
    def none_left(thread):
        raise RuntimeError("can't start new thread")

    received = Messages()
    resolver = Resolver(servers)
    peers = PeerSocket("tcp://127.0.0.1:0", received.put, NoChecks, resolver=resolver)
    peers.start()
    try:
        endpoint = Endpoint(f"tcp://peer:{peers.bound_endpoint.rpartition(':')[2]}")
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none_left)
            peers.send(endpoint, REQUEST)
            unreachable = await asyncio.wait_for(received.next(), 20)
            assert isinstance(unreachable, ev.PeerUnreachable)
            assert "start new thread" in unreachable.reason
        peers.send(endpoint, REQUEST)
        assert (await asyncio.wait_for(received.next(), 20)).message == REQUEST
    finally:
        peers.stop()


async def test_a_lookup_that_breaks_is_an_answer():
    """Else its name would keep its place, and its askers would wait, for ever."""

    def broken(host: str) -> list[str]:
        raise ValueError("embedded null character")

    resolver = Resolver(broken)
    for host in ("first", "second"):
        assert "embedded null character" in (await reply_of(resolver, host))[1]
    assert not resolver._queries
    assert resolver._threads.held == 0


async def test_an_asker_that_cannot_take_its_answer_keeps_it_from_no_other(servers):
    def broken(address: str, reason: str) -> None:
        raise RuntimeError("a defect")

    resolver = Resolver(servers)
    resolver.resolve("peer", broken)
    assert await reply_of(resolver, "peer") == ("127.0.0.1", "")
    assert servers.num_queries == 1


async def test_only_so_many_names_wait_and_one_user_leaves_room_for_another(servers, monkeypatch):
    resolver = Resolver(servers, give_up_s=0.1)
    monkeypatch.setattr(resolver, "_threads", FairShare(8))
    replies = await asyncio.gather(*(reply_of(resolver, f"silent-{number}", 1000) for number in range(8)))
    assert ["no name server answered" in reason for _, reason in replies] == [True] * 7 + [False]
    assert "give a numeric address" in replies[7][1]
    assert "numeric address" in (await reply_of(resolver, "peer", 1000))[1]
    assert await reply_of(resolver, "peer", 2000) == ("127.0.0.1", "")
    servers.released.set()


def test_the_systems_own():
    assert system_lookup("localhost")[0] in ("127.0.0.1", "::1")
    assert is_numeric("::1")
    assert not is_numeric("localhost")


async def test_a_peer_that_is_forgotten_while_it_is_looked_up_is_not_connected(servers):
    received = Messages()
    peers = PeerSocket("tcp://127.0.0.1:0", received.put, NoChecks, resolver=Resolver(servers))
    peers.start()
    try:
        servers.addresses["silent"] = ["127.0.0.1"]
        peers.send(Endpoint("tcp://silent:9441"), REQUEST)
        peers.disconnect(Endpoint("tcp://silent:9441"))
        servers.released.set()
        assert (await reply_of(peers._resolver, "silent"))[0] == "127.0.0.1"
        assert not peers._dealers
        assert received.empty()
    finally:
        peers.stop()
