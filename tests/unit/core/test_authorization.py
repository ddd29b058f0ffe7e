"""One rank, one user, one session: nobody ends, completes or replaces what is another's."""

from __future__ import annotations

from ipaddress import ip_network

import msgspec
import pytest

from kvxferd.core import Settings
from kvxferd.core import effects as fx
from kvxferd.core import events as ev
from kvxferd.core.allowlist import PeerAllowlist
from kvxferd.errors import Code, EngineError
from kvxferd.ids import Endpoint
from kvxferd.wire import worker as wk
from kvxferd.wire.common import TransferRef
from kvxferd.wire.endpoint import address_of, host_of, key_of, parse_endpoint
from tests.support.simulation import IDS, SINK_IDS, TOKENS, World, delivers, spec_of


def test_a_rank_of_another_engine_can_neither_complete_nor_end_a_transfer(world, sink):
    host = world.host("p")
    first, second = world.engine(host, "prefill", tp=2)
    stranger = world.engine(host, "stranger", tp=2)[1]
    ref = first.publish("t1", IDS, TOKENS)
    ticket = sink.pull(ref, SINK_IDS, TOKENS)
    stranger.ready("t1")
    stranger.say(wk.Unpublish(transfer_id="t1"))
    assert sink.ended(ticket) is None
    assert not first.received(wk.Released)
    second.ready("t1")
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)


def test_only_the_publishing_session_takes_a_transfer_back(world):
    first, second = world.engine(world.host("p"), "prefill", tp=2)
    first.publish("t1", IDS, TOKENS)
    second.say(wk.Unpublish(transfer_id="t1"))
    assert not first.received(wk.Released)
    assert not second.received(wk.Released)
    first.say(wk.Unpublish(transfer_id="t1"))
    assert [m.why for m in second.received(wk.Released)] == [Code.UNPUBLISHED]


def test_only_the_rank_whose_ticket_it_is_cancels_a_pull(world, source):
    first, second = world.engine(world.host("d"), "decode", tp=2)
    ref = source.publish("t1", IDS, TOKENS)
    world.hold_network = True
    ticket = first.pull(ref, SINK_IDS, TOKENS)
    second.say(wk.Cancel(ticket=ticket))
    assert first.ended(ticket) is None
    assert second.inbox[-1] is not first.inbox[-1]
    first.say(wk.Cancel(ticket=ticket))
    assert first.ended(ticket).code is Code.CANCELLED
    assert second.ended(ticket) is None


def test_a_reference_without_its_nonce_reads_and_ends_nothing(source, sink):
    ref = source.publish("t1", IDS, TOKENS)
    guessed = msgspec.structs.replace(ref, nonce="0" * 32)
    sink.say(wk.Abandon(ref=guessed))
    assert sink.ended(sink.pull(guessed, SINK_IDS, TOKENS)).code is Code.NONCE_WRONG
    assert not source.received(wk.Released)
    assert sink.reads(ref)


# --- users


@pytest.mark.parametrize("generation", ["g1", "g2"])
@pytest.mark.parametrize(("uid", "allowed"), [(1000, True), (0, True), (1001, False)])
def test_an_engine_is_its_users(world, uid, allowed, generation):
    host = world.host("p")
    owner = world.register(host, spec_of("prefill", tp=2), uid=1000)
    assert owner.received(wk.Registered)
    other = msgspec.structs.replace(spec_of("prefill", tp=2, generation=generation), tp_rank=1)
    second = world.register(host, other, uid=uid)
    assert bool(second.received(wk.Registered)) is allowed
    publisher = world.attach(host, other, uid)
    assert bool(publisher.received(wk.Registered)) is allowed
    if not allowed:
        assert {m.code for w in (second, publisher) for m in w.received(wk.Refused)} == {Code.NOT_ALLOWED}
        assert host.node.registry.successor(owner.spec.key) is None


# --- whom a node asks: what allow-lists say of endpoints, and what forged references come to


OWN, FRIEND, STRANGER = "0a" * 32, "0b" * 32, "0c" * 32
KEYS = PeerAllowlist(own_key=OWN, allowed_keys=frozenset([FRIEND]))
LAN = PeerAllowlist(networks=(ip_network("10.1.0.0/16"), ip_network("fd00::/8")))


@pytest.mark.parametrize(
    ("trust", "endpoint", "problem"),
    [
        (PeerAllowlist(), "tcp://node-7:1", ""),
        # Never in the clear instead:
        (PeerAllowlist(), f"tcp://node-7:1#{FRIEND}", "peer.curve_secret_key_file"),
        (KEYS, f"tcp://node-7:1#{FRIEND}", ""),
        (KEYS, f"tcp://node-7:1#{OWN}", ""),
        (KEYS, f"tcp://node-7:1#{STRANGER}", "peer.curve_allowed_keys"),
        (KEYS, "tcp://node-7:1", "no public key"),
        (PeerAllowlist(own_key=OWN, allowed_keys=None), f"tcp://node-7:1#{STRANGER}", ""),
        (PeerAllowlist(own_key=OWN, allowed_keys=None), "tcp://node-7:1", "no public key"),
        (LAN, "tcp://10.1.2.3:1", ""),
        (LAN, "tcp://10.2.2.3:1", "peer.allowed_addresses"),
        (LAN, "tcp://[fd00::1]:1", ""),
        (LAN, "tcp://[2001:db8::1]:1", "peer.allowed_addresses"),
        (LAN, "tcp://[::ffff:10.1.2.3]:1", ""),
        (LAN, "tcp://node-7:1", "peer.allowed_addresses"),  # who knows what that resolves to
    ],
)
def test_whom_it_asks(trust: PeerAllowlist, endpoint: str, problem: str) -> None:
    if not problem:
        trust.check(Endpoint(endpoint))
        return
    with pytest.raises(EngineError, match=problem) as refused:
        trust.check(Endpoint(endpoint))
    assert refused.value.code is Code.NOT_ALLOWED


def test_an_endpoint_has_one_spelling_and_three_parts() -> None:
    endpoint = parse_endpoint(f"tcp://Node-7:0941#{FRIEND.upper()}")
    assert endpoint == f"tcp://node-7:941#{FRIEND}"
    assert (address_of(endpoint), key_of(endpoint)) == ("tcp://node-7:941", FRIEND)
    assert host_of(parse_endpoint("tcp://[FD00::1]:9441")) == "fd00::1"
    assert key_of(parse_endpoint("tcp://node-7:941")) == ""


@pytest.mark.parametrize(
    "tail", ["#", "#0b", f"#{FRIEND}0", f"#{'zz' * 32}", f"#{FRIEND}#{FRIEND}", f" #{FRIEND}"]
)
def test_half_a_key_is_no_endpoint(tail: str) -> None:
    with pytest.raises(EngineError) as refused:
        parse_endpoint("tcp://node-7:1" + tail)
    assert refused.value.code is Code.ENDPOINT_INVALID


def test_a_reference_that_is_not_allowed_fails_its_pull_and_asks_nobody() -> None:
    world = World(settings=Settings(allowlist=LAN))
    sink = world.engine(world.host("d"), "decode")[0]
    source = world.engine(world.host("p"), "prefill")[0]
    ref = source.publish("t1", IDS, TOKENS)
    world.hold_network = True
    ticket = sink.pull(ref, SINK_IDS, TOKENS)
    sink.say(wk.Prepare(ref=ref))
    sink.say(wk.Abandon(ref=ref))
    assert sink.ended(ticket).code is Code.NOT_ALLOWED
    assert not world.network
    assert sink.host.node.snapshot().peers == ()


def test_a_home_that_is_not_allowed_refuses_the_registration() -> None:
    world = World(settings=Settings(allowlist=LAN))
    host = world.host("p")
    worker = world.register(host, spec_of("spread", pp=2, home="tcp://elsewhere:9441"))
    (refused,) = worker.received(wk.Refused)
    assert refused.code is Code.NOT_ALLOWED
    assert not world.network


def test_its_own_engines_are_always_read() -> None:
    world = World(settings=Settings(allowlist=LAN))
    host = world.host("node")
    source, sink = world.engine(host, "prefill")[0], world.engine(host, "decode")[0]
    assert delivers(source, sink, "t1")
    forged = msgspec.structs.replace(source.publish("t2", IDS, TOKENS), endpoint="tcp://evil:1")
    assert sink.ended(sink.pull(forged, SINK_IDS, TOKENS)).code is Code.NOT_ALLOWED


# --- the allow-lists of peers change while the node runs


NOBODY_ELSE = PeerAllowlist(networks=(ip_network("192.0.2.0/24"),))


def test_a_peer_that_is_admitted_no_more_is_forgotten_and_not_asked_again(world, source, sink):
    assert delivers(source, sink, "r1")
    node = sink.host.node
    (peer,) = node.peers.endpoints()
    assert fx.ClosePeerConnection(peer) in node.feed(ev.AllowlistChanged(NOBODY_ELSE), world.now)
    assert not node.peers.endpoints()
    ticket = sink.pull(source.publish("r2", IDS, TOKENS), SINK_IDS, TOKENS)
    assert sink.ended(ticket).code is Code.NOT_ALLOWED
    sink.say(wk.Abandon(ref=TransferRef(peer, "prefill", "g1", "r1", "n")))
    assert not node.peers.endpoints()


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
