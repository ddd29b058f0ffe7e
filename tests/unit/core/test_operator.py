"""What an operator does to a node: drop a peer, cancel a transfer, cancel a pull."""

from __future__ import annotations

from ipaddress import ip_network

import pytest

from kvxferd.core import effects as fx
from kvxferd.core import events as ev
from kvxferd.core.allowlist import PeerAllowlist
from kvxferd.errors import Code
from kvxferd.ids import Endpoint, EngineKey
from kvxferd.records import HandshakeRecord, PullRecord
from kvxferd.wire import worker as wk
from tests.support.simulation import IDS, SINK_IDS, TOKENS, delivers, held_pull, mover_of

PREFILL = EngineKey("prefill", "g1")


def test_a_dropped_peer_is_greeted_anew(world, source, sink):
    assert delivers(source, sink, "t1")
    node = sink.host.node
    (peer,) = node.peers.find("tcp://p:9441")
    effects = node.feed(ev.PeerDropRequested(peer), world.now)
    assert effects == [fx.ClosePeerConnection(peer)]
    assert node.snapshot().peers == ()
    assert delivers(source, sink, "t2")
    assert len([record for record in sink.host.records if isinstance(record, HandshakeRecord)]) == 2


DROPPED = ev.PeerDropRequested(Endpoint("tcp://p:9441"))
UNADMITTED = ev.AllowlistChanged(PeerAllowlist(networks=(ip_network("192.0.2.0/24"),)))


@pytest.mark.parametrize("num_arrived", [0, 1, 2])  # waits for the hello, for the engine, for the grant
@pytest.mark.parametrize(("event", "code"), [(DROPPED, Code.CANCELLED), (UNADMITTED, Code.NOT_ALLOWED)])
def test_what_waits_for_a_dropped_peer_fails_at_once(world, source, sink, num_arrived, event, code):
    ref = source.publish("t1", IDS, TOKENS)
    world.hold_network = True
    ticket = sink.pull(ref, SINK_IDS, TOKENS)
    for _ in range(2 * num_arrived):
        world.arrive(world.network.popleft())
    assert sink.ended(ticket) is None
    sink.host.feed(event)
    assert sink.ended(ticket).code is code
    assert sink.ended(ticket).safe_to_reuse
    world.network.clear()
    world.hold_network = False
    sink.host.feed(ev.AllowlistChanged(PeerAllowlist()))
    assert sink.reads(ref)
    world.advance(100)
    assert source.host.node.is_idle


@pytest.mark.parametrize("event", [DROPPED, UNADMITTED])
def test_a_pull_with_its_grant_goes_on_without_the_peer(world, source, sink, event):
    ticket = held_pull(source, sink)
    sink.host.feed(event)
    assert sink.ended(ticket) is None
    mover_of(sink).work()
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)
    assert sink.num_wrong(SINK_IDS, TOKENS, seed=1) == 0
    if event is DROPPED:
        assert [m.why for m in source.received(wk.Released)] == [Code.COMPLETED]
    else:
        world.advance(1000)  # what it was to acknowledge ends with its time, and nothing is asked
        assert not sink.host.node.peers.endpoints()


def test_an_unknown_peer_is_no_matter(world, sink):
    assert sink.host.node.peers.find("tcp://nobody:1") == []
    assert sink.host.node.feed(ev.PeerDropRequested("tcp://nobody:1"), world.now) == []


def test_a_cancelled_transfer_is_released_with_its_fence_word_first(world, source, sink):
    (mover,) = sink.host.movers.values()
    mover.hold = True
    ref = source.publish("t1", IDS, TOKENS)
    ticket = sink.pull(ref, SINK_IDS, TOKENS)
    mover.copy()
    source.host.feed(ev.TransferCancelRequested(PREFILL, "t1"))
    assert [m.why for m in source.received(wk.Released)] == [Code.CANCELLED]
    mover.finish()
    assert sink.ended(ticket).code is Code.RELEASED
    for again in (PREFILL, EngineKey("prefill", "g2")):
        source.host.feed(ev.TransferCancelRequested(again, "t1"))
    assert len(source.received(wk.Released)) == 1
    late = sink.pull(ref, SINK_IDS, TOKENS)
    assert sink.ended(late).code in (Code.RELEASED, Code.CANCELLED)


def test_a_cancelled_pull_ends_once_and_gives_its_grant_back(world, source, sink):
    ticket = held_pull(source, sink)
    (pull,) = sink.host.node.snapshot().pulls
    sink.host.feed(ev.PullCancelRequested(pull.pull))
    sink.host.feed(ev.PullCancelRequested(pull.pull))
    mover_of(sink).work()  # it was too quick to be stopped, and says so
    assert sink.ended(ticket) is not None
    sink.host.feed(ev.PullCancelRequested(pull.pull))
    assert not sink.host.node.snapshot().pulls
    assert len([record for record in sink.host.records if isinstance(record, PullRecord)]) == 1
    assert not source.host.node.published.table.by_grant


def test_a_pull_that_no_mover_has_is_cancelled_at_once(world, source, sink):
    ref = source.publish("t1", IDS, TOKENS)
    world.hold_network = True
    ticket = sink.pull(ref, SINK_IDS, TOKENS)
    (pull,) = sink.host.node.snapshot().pulls
    sink.host.feed(ev.PullCancelRequested(pull.pull))
    assert sink.ended(ticket).code is Code.CANCELLED
    world.deliver()
    assert source.host.node.is_idle is False
    assert sink.host.node.is_idle
