"""Whom a node asks: what allow-lists say of endpoints, and what forged references come to."""

from __future__ import annotations

from ipaddress import ip_network

import msgspec
import pytest

from kvxferd.core import Settings
from kvxferd.core.allowlist import PeerAllowlist
from kvxferd.errors import Code, EngineError
from kvxferd.ids import Endpoint
from kvxferd.wire import worker as wk
from kvxferd.wire.endpoint import address_of, host_of, key_of, parse_endpoint
from tests.support.simulation import World, spec_of

OWN, FRIEND, STRANGER = "0a" * 32, "0b" * 32, "0c" * 32
KEYS = PeerAllowlist(own_key=OWN, allowed_keys=frozenset([FRIEND]))
LAN = PeerAllowlist(networks=(ip_network("10.1.0.0/16"), ip_network("fd00::/8")))


@pytest.mark.parametrize(
    ("trust", "endpoint", "problem"),
    [
        (PeerAllowlist(), "tcp://node-7:1", ""),
        (
            PeerAllowlist(),
            f"tcp://node-7:1#{FRIEND}",
            "peer.curve_secret_key_file",
        ),  # never in the clear instead
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
    ref = source.publish("t1", [3, 1, 2], 11)
    world.hold_network = True
    ticket = sink.pull(ref, [7, 9, 4], 11)
    sink.say(wk.Prepare(ref=ref))
    sink.say(wk.Abandon(ref=ref))
    assert sink.ended(ticket).code is Code.NOT_ALLOWED
    assert not world.network
    assert sink.host.node.snapshot().peers == ()


def test_a_home_that_is_not_allowed_refuses_the_registration() -> None:
    world = World(settings=Settings(allowlist=LAN))
    host = world.host("p")
    worker = world.register(host, spec_of("spread", pp=2, home="tcp://elsewhere:9441"))
    (refused,) = worker.heard(wk.Refused)
    assert refused.code is Code.NOT_ALLOWED
    assert not world.network


def test_its_own_engines_are_always_read() -> None:
    world = World(settings=Settings(allowlist=LAN))
    host = world.host("node")
    source, sink = world.engine(host, "prefill")[0], world.engine(host, "decode")[0]
    ticket = sink.pull(source.publish("t1", [3, 1, 2], 11), [7, 9, 4], 11)
    assert isinstance(sink.ended(ticket), wk.Delivered)
    forged = msgspec.structs.replace(source.publish("t2", [3, 1, 2], 11), endpoint="tcp://evil:1")
    assert sink.ended(sink.pull(forged, [7, 9, 4], 11)).code is Code.NOT_ALLOWED
