"""Thousands of asks wait: a change elsewhere looks at none of them, one of theirs at some at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvxferd.core import events as ev
from kvxferd.core.context import CALLS_PER_TICK
from kvxferd.core.source.grants import GrantServer
from kvxferd.core.source.manifests import HandshakeServer
from kvxferd.errors import Code
from kvxferd.ids import AgentName, Rank
from kvxferd.wire import mover as mv
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import PEER_MESSAGES
from kvxferd.wire.common import TransferRef
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


def most_of_an_event(source: Worker, monkeypatch: pytest.MonkeyPatch, looked_at: list[object]) -> list[int]:
    """Return how many are considered in each event from now on, in a list that grows."""
    counts: list[int] = []
    feed = source.host.node.feed

    def counted(event: ev.Event, now: float):  # type: ignore[no-untyped-def]
        before = len(looked_at)
        effects = feed(event, now)
        counts.append(len(looked_at) - before)
        return effects

    monkeypatch.setattr(source.host.node, "feed", counted)
    return counts


def send_request(world: World, source: Worker, ref: TransferRef, number: int, agent: str = "gone") -> None:
    reads = ((Rank(0, 0), agent),)
    consumer = Consumer("decode", "g1", Rank(0, 0), 1)
    request = GrantRequest(
        request=number, grant=f"g{number}", ref=ref, consumer=consumer, reads=reads, wait_s=9.0
    )
    world.feed(source.host, ev.PeerRequest(b"d", request, ""))  # type: ignore[arg-type]


@pytest.fixture
def waiting() -> tuple[World, Worker]:
    """A rank of an engine of two, and asks and fetches that wait for the other one."""
    world = World()
    world.hold_network = True
    source = world.register(world.host("p"), spec_of("prefill", tp=2))
    ref = TransferRef(source.host.endpoint, "prefill", "g1", "t", "n")
    for number in range(20):
        send_request(world, source, ref, number)
        fetch = ManifestRequest(request=100 + number, engine_id="prefill", generation="g1", wait_s=9.0)
        world.feed(source.host, ev.PeerRequest(b"d", fetch, ""))
    return world, source


def test_another_engines_rank_that_comes_and_goes_makes_nobody_look(
    looked_at: list[object], waiting: tuple[World, Worker]
) -> None:
    world, source = waiting
    looked_at.clear()
    other = world.register(source.host, spec_of("other"))
    assert other.received(wk.Registered)
    other.close()
    assert not looked_at


def test_the_engines_own_change_is_looked_at(looked_at: list[object], waiting: tuple[World, Worker]) -> None:
    world, source = waiting
    source.close()
    assert len(looked_at) >= 40
    world.advance(20.0)
    kept = source.host.node.waiting
    assert not len(kept)
    assert not kept._by_key
    assert not kept._share.held


def test_what_many_wait_for_is_looked_at_in_turns(
    looked_at: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    world.hold_network = True
    source = world.register(world.host("p"), spec_of("prefill"))
    node, most = source.host.node, most_of_an_event(source, monkeypatch, looked_at)
    rank = node.sessions[source.session].rank
    assert rank is not None
    assert rank.agent is not None
    ref = TransferRef(source.host.endpoint, "prefill", "g1", "t", "n")
    num = 2 * CALLS_PER_TICK + 10
    for number in range(num):
        # Past the world, which checks the books after each event.
        request = GrantRequest(
            request=number,
            grant=f"g{number}",
            ref=ref,
            consumer=Consumer("decode", "g1", Rank(0, 0), 1),
            reads=((Rank(0, 0), rank.agent),),
            wait_s=9.0,
        )
        node.feed(ev.PeerRequest(b"d", request, ""), world.now)
    looked_at.clear()
    source.publish("t", IDS, TOKENS, nonce="n")
    world.advance(0.1)
    assert CALLS_PER_TICK / 2 < max(most) <= CALLS_PER_TICK
    granted = [m for e in world.network if isinstance(m := decoded(e.payload), GrantReply)]
    assert len(granted) == num
    assert not node.waiting._due


def test_a_mover_that_repeats_itself_makes_nobody_look(
    looked_at: list[object], waiting: tuple[World, Worker]
) -> None:
    _, source = waiting
    mover = next(iter(source.host.movers.values()))
    looked_at.clear()
    for _ in range(10):
        mover.say(mv.FenceMapped(session=source.session, address=1 << 20, metadata=b"m"))
        mover.say(mv.Polling(token=1))
    assert not looked_at


def decoded(payload: bytes) -> object:
    return PEER_MESSAGES.decode(payload)


@pytest.mark.parametrize("is_repeated", [True, False])
def test_what_nobody_sends_again_waits_no_more(is_repeated: bool) -> None:
    """Its reader is dead: granted, it would keep the transfer for a lease."""
    world = World()
    source = world.register(world.host("p"), spec_of("prefill", tp=2))
    source.fill(IDS, TOKENS, seed=1)
    ref = TransferRef(source.host.endpoint, "prefill", "g1", "t", "n")
    consumer = Consumer("decode", "g1", Rank(0, 0), 1)
    grant = GrantRequest(
        request=1, grant="g", ref=ref, consumer=consumer, reads=((Rank(0, 0), "gone"),), wait_s=300.0
    )
    fetch = ManifestRequest(request=2, engine_id="prefill", generation="g1", wait_s=300.0)
    world.settings = replace(world.settings, handshake_wait_s=300.0)
    source.host.node.context.settings = world.settings
    for _ in range(10):
        for message in (grant, fetch):
            world.feed(source.host, ev.PeerRequest(b"d", message, ""))
        world.advance(world.settings.resend_s)
        if not is_repeated:
            break
    world.advance(world.settings.silent_after_s)
    assert len(source.host.node.waiting) == 2
    world.advance(world.settings.resend_s + 0.1)
    assert len(source.host.node.waiting) == 0


def test_a_reader_that_waits_keeps_its_movers_polling_though_a_grant_of_its_name_ends() -> None:
    """The next mover of one rank does not poll yet, while the reader's former grant has lapsed."""
    world = World()
    first, second = world.engine(world.host("p"), "prefill", tp=2)
    node = first.host.node
    ref = first.publish("t", IDS, TOKENS, lease_s=120.0)
    second.ready("t")
    first_mover, second_mover = first.host.movers.values()

    def request(number: int, agents: list[str]) -> None:
        reads = tuple((Rank(0, number), AgentName(agent)) for number, agent in enumerate(agents))
        consumer = Consumer("decode", "g1", Rank(0, 0), 1)
        message = GrantRequest(
            request=number, grant="g", ref=ref, consumer=consumer, reads=reads, wait_s=600.0, after_tokens=0
        )
        world.feed(first.host, ev.PeerRequest(b"d", message, ""))

    request(1, [first_mover.agent, second_mover.agent])
    assert node.published.table.by_grant
    second_mover.die()
    world.advance(1.0)
    *_, next_mover = first.host.movers.values()
    next_mover.mute = True
    while node.published.table.by_grant:
        request(2, [first_mover.agent, next_mover.agent])
        world.advance(1.0)
    assert len(node.waiting) == 1
    world.advance(world.settings.polling_linger_s + 0.1)
    assert first_mover.attended


def test_a_release_refuses_those_that_wait_for_the_transfer(waiting: tuple[World, Worker]) -> None:
    world, source = waiting
    second = world.register(source.host, spec_of("prefill", tp=2, tp_rank=1))
    agents = [source.host.node.sessions[worker.session].rank.agent for worker in (source, second)]
    ref = source.publish("unready", IDS, TOKENS)
    send_request(world, source, ref, 50, agents[0])
    world.network.clear()
    source.say(wk.Unpublish(transfer_id=ref.transfer_id))
    (refused,) = [m for e in world.network if isinstance(m := decoded(e.payload), PeerRefused)]
    assert (refused.request, refused.code) == (50, Code.RELEASED)
    assert refused.message == (
        "cannot grant transfer unready: it was released (unpublished); its blocks may hold others"
    )
