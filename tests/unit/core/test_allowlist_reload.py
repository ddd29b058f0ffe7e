"""The allow-lists of peers change while the node runs."""

from __future__ import annotations

import ipaddress

import pytest

from kvxferd.core import effects as fx
from kvxferd.core import events as ev
from kvxferd.core.allowlist import PeerAllowlist
from kvxferd.errors import Code
from kvxferd.ids import EngineKey
from kvxferd.wire import worker as wk
from tests.support.simulation import IDS, SINK_IDS, TOKENS

PREFILL = EngineKey("prefill", "g1")
NOBODY_ELSE = PeerAllowlist(networks=(ipaddress.ip_network("192.0.2.0/24"),))


def test_a_peer_that_is_admitted_no_more_is_forgotten_and_not_asked_again(world, source, sink):
    ticket = sink.pull(source.publish("r1", IDS, TOKENS), SINK_IDS, TOKENS)
    assert isinstance(sink.ended(ticket), wk.Delivered)
    node = sink.host.node
    (peer,) = node.peers.endpoints()
    assert fx.ClosePeerConnection(peer) in node.feed(ev.AllowlistChanged(NOBODY_ELSE), world.now)
    assert not node.peers.endpoints()
    ticket = sink.pull(source.publish("r2", IDS, TOKENS), SINK_IDS, TOKENS)
    assert sink.ended(ticket).code is Code.NOT_ALLOWED
    node.handshake_client.learn_engine(peer, PREFILL, 1.0, lambda outcome: None, uid=0)
    assert not node.peers.endpoints()


@pytest.mark.parametrize("num_arrived", [0, 1, 2])  # waits for the greeting, for the engine, for the grant
def test_what_waits_for_such_a_peer_fails_at_once(world, source, sink, num_arrived):
    ref = source.publish("r1", IDS, TOKENS)
    world.hold_network = True
    ticket = sink.pull(ref, SINK_IDS, TOKENS)
    for _ in range(2 * num_arrived):
        world.arrive(world.network.popleft())
    assert sink.ended(ticket) is None
    world.feed(sink.host, ev.AllowlistChanged(NOBODY_ELSE))
    assert sink.ended(ticket).code is Code.NOT_ALLOWED
    assert sink.ended(ticket).safe_to_reuse
    world.network.clear()
    world.hold_network = False
    world.feed(sink.host, ev.AllowlistChanged(PeerAllowlist()))
    assert sink.reads(ref)


def test_a_pull_with_its_grant_goes_on(world, source, sink):
    (mover,) = sink.host.movers.values()
    mover.hold = True
    ticket = sink.pull(source.publish("r1", IDS, TOKENS), SINK_IDS, TOKENS)
    world.feed(sink.host, ev.AllowlistChanged(NOBODY_ELSE))
    assert sink.ended(ticket) is None
    mover.hold = False
    mover.copy()
    mover.finish()
    world.settle()
    assert isinstance(sink.ended(ticket), wk.Delivered)
    world.advance(1000)  # what it was to acknowledge ends with its time, and nothing is asked
    assert not sink.host.node.peers.endpoints()


@pytest.mark.parametrize(
    ("after", "before", "want"),
    [
        (PeerAllowlist(), PeerAllowlist(), True),
        (PeerAllowlist(allowed_keys=frozenset("ab")), PeerAllowlist(allowed_keys=frozenset("a")), True),
        (PeerAllowlist(allowed_keys=frozenset("a")), PeerAllowlist(allowed_keys=frozenset("ab")), False),
        (PeerAllowlist(allowed_keys=None), PeerAllowlist(allowed_keys=frozenset("a")), True),
        (PeerAllowlist(allowed_keys=frozenset("a")), PeerAllowlist(allowed_keys=None), False),
        (NOBODY_ELSE, PeerAllowlist(), False),
        (PeerAllowlist(), NOBODY_ELSE, True),
        (NOBODY_ELSE, NOBODY_ELSE, True),
    ],
)
def test_lists_that_leave_nobody_out_cut_no_connection(after, before, want):
    assert after.allows_all_of(before) is want
