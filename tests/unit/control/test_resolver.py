"""Host names are resolved beside libzmq: a name without an answer costs whoever asked for it."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from kvxferd.control.resolver import Resolver, is_numeric, system_lookup
from kvxferd.core import events as ev
from kvxferd.core.effects import NO_USER
from kvxferd.core.limits.ledger import FairShare
from kvxferd.ids import Endpoint
from tests.support.peer_socket_harness import HELLO

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


async def test_where_no_thread_can_be_had_the_name_has_no_address_and_is_asked_for_anew(
    servers, start_peer, no_thread_left
):
    peers = start_peer(resolver=Resolver(servers))
    endpoint = Endpoint(f"tcp://peer:{peers.port}")
    with no_thread_left():
        peers.socket.send(endpoint, HELLO)
        unreachable = await peers.next()
        assert isinstance(unreachable, ev.PeerUnreachable)
        assert "start new thread" in unreachable.reason
    peers.socket.send(endpoint, HELLO)
    assert (await peers.next()).message == HELLO


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


async def test_a_peer_that_is_forgotten_while_it_is_looked_up_is_not_connected_nor_reported_after_a_stop(
    servers, start_peer
):
    resolver = Resolver(servers)
    peers = start_peer(resolver=resolver)
    servers.addresses["silent"] = ["127.0.0.1"]
    peers.socket.send(Endpoint("tcp://silent:9441"), HELLO)
    peers.socket.disconnect(Endpoint("tcp://silent:9441"))
    servers.released.set()
    assert (await reply_of(resolver, "silent"))[0] == "127.0.0.1"
    assert not peers.socket._dealers
    servers.released.clear()
    peers.socket.send(Endpoint("tcp://silent-too:9441"), HELLO)
    await asyncio.sleep(0)  # it is asked for
    peers.stop()
    servers.released.set()
    assert not (await reply_of(resolver, "silent-too"))[0]
    assert peers.received.empty()


async def test_an_endpoint_that_libzmq_refuses_is_unreachable_and_no_more(start_peer):
    peers = start_peer()
    for endpoint in ("nonsense", "tcp://-x:1", peers.address):
        peers.socket.send(Endpoint(endpoint), HELLO)
    unreachable = []
    while isinstance(event := await peers.next(), ev.PeerUnreachable):
        unreachable.append(event.endpoint)
    assert event.message == HELLO
    assert set(unreachable) <= {"nonsense", "tcp://-x:1"}
