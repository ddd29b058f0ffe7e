"""Thousands of asks wait: a change elsewhere looks at none of them, one of theirs at some at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvxferd.config import PeerConfig
from kvxferd.core import events as ev
from kvxferd.core.context import CALLS_PER_TICK
from kvxferd.core.limits.table import GRANTS
from kvxferd.core.source.grants import GrantServer
from kvxferd.core.source.manifests import HandshakeServer
from kvxferd.errors import Code
from kvxferd.ids import AgentName, Rank
from kvxferd.wire import mover as mv
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import PEER_MESSAGES
from kvxferd.wire.common import Message, TransferRef
from kvxferd.wire.peer import Consumer, GrantReply, GrantRequest, ManifestRequest, PeerRefused
from tests.support.simulation import IDS, TOKENS, Worker, World, spec_of


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is considered: asks and fetches."""
    seen: list[object] = []
    for kind in (GrantServer, HandshakeServer):

        def reply(self, waiting, original=kind._reply):  # type: ignore[no-untyped-def]
            seen.append(waiting)
            return original(self, waiting)

        monkeypatch.setattr(kind, "_reply", reply)
    return seen


def grant_request(
    ref: TransferRef, number: int, *agents: str, grant: str = "", wait_s: float = 9.0, **more: object
) -> GrantRequest:
    """A request to read from those agents, the first of rank 0."""
    reads = tuple((Rank(0, tp_rank), AgentName(agent)) for tp_rank, agent in enumerate(agents))
    consumer = Consumer("decode", "g1", Rank(0, 0), 1)
    grant = grant or f"g{number}"
    return GrantRequest(
        request=number, grant=grant, ref=ref, consumer=consumer, reads=reads, wait_s=wait_s, **more
    )


def send(world: World, source: Worker, message: Message) -> None:
    source.host.feed(ev.PeerRequest(b"d", message, ""))


@pytest.fixture
def waiting() -> tuple[World, Worker]:
    """A rank of an engine of two, and asks and fetches that wait for the other one."""
    world = World()
    world.hold_network = True
    source = world.register(world.host("p"), spec_of("prefill", tp=2))
    ref = TransferRef(source.host.endpoint, "prefill", "g1", "t", "n")
    for number in range(20):
        send(world, source, grant_request(ref, number, "gone"))
        fetch = ManifestRequest(request=100 + number, engine_id="prefill", generation="g1", wait_s=9.0)
        send(world, source, fetch)
    return world, source


def test_another_engines_rank_that_comes_and_goes_makes_nobody_look(looked_at, waiting):
    world, source = waiting
    looked_at.clear()
    other = world.register(source.host, spec_of("other"))
    assert other.received(wk.Registered)
    other.close()
    assert not looked_at


def test_the_engines_own_change_is_looked_at(looked_at, waiting):
    world, source = waiting
    source.close()
    assert len(looked_at) >= 40
    world.advance(20.0)
    kept = source.host.node.waiting
    assert not len(kept)
    assert not kept._by_key
    assert not kept._share.held


def test_what_many_wait_for_is_looked_at_in_turns(world, looked_at, monkeypatch):
    world.hold_network = True
    source = world.register(world.host("p"), spec_of("prefill"))
    node = source.host.node
    feed = node.feed
    in_each: list[int] = []  # how many were looked at in each event

    def counted(event: ev.Event, now: float):  # type: ignore[no-untyped-def]
        looked_at.clear()
        effects = feed(event, now)
        in_each.append(len(looked_at))
        return effects

    monkeypatch.setattr(node, "feed", counted)
    agent = node.sessions[source.session].rank.agent
    ref = TransferRef(source.host.endpoint, "prefill", "g1", "t", "n")
    num = 2 * CALLS_PER_TICK + 10
    for number in range(num):  # past the world, which checks the books after each event
        node.feed(ev.PeerRequest(b"d", grant_request(ref, number, agent), ""), world.now)
    source.publish("t", IDS, TOKENS, nonce="n")
    world.advance(0.1)
    assert CALLS_PER_TICK / 2 < max(in_each) <= CALLS_PER_TICK
    granted = [m for e in world.network if isinstance(m := PEER_MESSAGES.decode(e.payload), GrantReply)]
    assert len(granted) == num
    assert not node.waiting._due


def test_a_mover_that_repeats_itself_makes_nobody_look(looked_at, waiting):
    _, source = waiting
    mover = next(iter(source.host.movers.values()))
    looked_at.clear()
    for _ in range(10):
        mover.say(mv.FenceMapped(session=source.session, address=1 << 20, metadata=b"m"))
        mover.say(mv.Polling(token=1))
    assert not looked_at


@pytest.mark.parametrize("is_repeated", [True, False])
def test_what_nobody_sends_again_waits_no_more(world, is_repeated):
    """Its reader is dead: granted, it would keep the transfer for a lease."""
    source = world.register(world.host("p"), spec_of("prefill", tp=2))
    source.fill(IDS, TOKENS, seed=1)
    ref = TransferRef(source.host.endpoint, "prefill", "g1", "t", "n")
    grant = grant_request(ref, 1, "gone", wait_s=300.0)
    fetch = ManifestRequest(request=2, engine_id="prefill", generation="g1", wait_s=300.0)
    world.settings = replace(world.settings, peer=PeerConfig(handshake_wait_s=300.0))
    source.host.node.context.settings = world.settings
    for _ in range(10):
        for message in (grant, fetch):
            send(world, source, message)
        world.advance(world.settings.peer.request_timeout_s)
        if not is_repeated:
            break
    world.advance(world.settings.peer.silent_after_s - 0.1)
    assert len(source.host.node.waiting) == 2
    world.advance(0.2)
    assert len(source.host.node.waiting) == 0


def test_a_reader_that_waits_keeps_its_movers_polling_though_a_grant_of_its_name_ends(world):
    """The next mover of one rank does not poll yet, while the reader's former grant has lapsed."""
    first, second = world.engine(world.host("p"), "prefill", tp=2)
    node = first.host.node
    ref = first.publish("t", IDS, TOKENS, lease_s=120.0)
    second.ready("t")
    first_mover, second_mover = first.host.movers.values()

    def request(number: int, *agents: str) -> None:
        send(world, first, grant_request(ref, number, *agents, grant="g", wait_s=600.0, after_tokens=0))

    request(1, first_mover.agent, second_mover.agent)
    assert node.published.table.by_grant
    second_mover.die()
    world.advance(1.0)
    *_, next_mover = first.host.movers.values()
    next_mover.mute = True
    while node.published.table.by_grant:
        request(2, first_mover.agent, next_mover.agent)
        world.advance(1.0)
    assert len(node.waiting) == 1
    world.advance(world.settings.polling_linger_s + 0.1)
    assert first_mover.attended


def test_a_request_that_is_refused_as_busy_waits_no_more(world):
    world.hold_network = True
    source = world.register(world.host("p"), spec_of("prefill"))
    node = source.host.node
    ref = source.publish("t", IDS, TOKENS)
    node.context.ledger[GRANTS].limit = 0
    send(world, source, grant_request(ref, 1, node.sessions[source.session].rank.agent))
    (refused,) = [m for e in world.network if isinstance(m := PEER_MESSAGES.decode(e.payload), PeerRefused)]
    assert refused.code is Code.BUSY
    assert not len(node.waiting)
    assert not node.waiting._share.held


def test_a_mover_that_a_grant_reads_no_more_may_stop_polling(world):
    first, second = world.engine(world.host("p"), "prefill", tp=2)
    ref = first.publish("t", IDS, TOKENS, lease_s=120.0)
    second.ready("t")
    first_mover, second_mover = first.host.movers.values()
    send(world, first, grant_request(ref, 1, first_mover.agent, second_mover.agent, grant="g"))
    assert second_mover.attended
    send(world, first, grant_request(ref, 2, first_mover.agent, grant="g"))
    world.advance(world.settings.polling_linger_s + 0.1)
    assert (first_mover.attended, second_mover.attended) == (True, False)


def test_a_release_refuses_those_that_wait_for_the_transfer(waiting):
    world, source = waiting
    second = world.register(source.host, spec_of("prefill", tp=2, tp_rank=1))
    agents = [source.host.node.sessions[worker.session].rank.agent for worker in (source, second)]
    ref = source.publish("unready", IDS, TOKENS)
    send(world, source, grant_request(ref, 50, agents[0]))
    world.network.clear()
    source.say(wk.Unpublish(transfer_id=ref.transfer_id))
    (refused,) = [m for e in world.network if isinstance(m := PEER_MESSAGES.decode(e.payload), PeerRefused)]
    assert (refused.request, refused.code) == (50, Code.RELEASED)
    assert refused.message == (
        "cannot grant transfer unready: it was released (unpublished); its blocks may hold others"
    )
