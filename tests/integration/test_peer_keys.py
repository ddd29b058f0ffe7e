"""Peers by key and by address: who is let in, who is not, and who is told why."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import zmq
from zmq.utils import z85

from kvxferd.control.curve_keys import make_key
from kvxferd.wire.codec import PEER_MESSAGES, encode
from kvxferd.wire.endpoint import address_of, key_of
from kvxferd.wire.peer import PEER_VERSIONS, PeerHello, PeerWelcome
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.requests import publish, pull_and_check, spec_of

REFUSED_MS = 800  # nothing comes back; this is how long nothing is waited for


class Ring:
    """Keys by name, and the flags of a daemon that has one of them and lets others in."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._public: dict[str, str] = {}

    def public(self, name: str) -> str:
        if name not in self._public:
            self._public[name] = make_key(self._directory / f"{name}.key").public
        return self._public[name]

    def flags(self, own: str, *allowed: str) -> tuple[str, ...]:
        self.public(own)
        keys = ",".join(name if name == "any" else self.public(name) for name in allowed)
        path = str(self._directory / f"{own}.key")
        return ("--peer-curve-secret-key-file", path, "--peer-curve-allowed-keys", keys)


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    return Ring(tmp_path)


def refusal_of(sink, ref: dict) -> dict:
    name, fields = sink.end_of(sink.pull(ref, list(range(32)), 500, 2.0))
    assert name == "Failed"
    assert fields["safe_to_reuse"]
    return fields


def test_daemons_that_know_each_others_keys_transfer(fleet: Fleet, ring: Ring):
    prefill = fleet.daemon("prefill", *ring.flags("p", "d"))
    decode = fleet.daemon("decode", *ring.flags("d", "p"))
    (source,) = fleet.engine(prefill, spec_of("prefill"))
    (sink,) = fleet.engine(decode, spec_of("decode"))
    ref = publish([source], 1)
    assert key_of(ref["endpoint"]) == ring.public("p")
    pull_and_check([sink], ref, 1)


def test_an_engine_on_two_nodes_and_its_reader_by_keys(fleet: Fleet, ring: Ring):
    home = fleet.daemon("home", *ring.flags("h", "m", "d"))
    member = fleet.daemon("member", *ring.flags("m", "h"))
    decode = fleet.daemon("decode", *ring.flags("d", "any"))
    spec = spec_of("prefill", pp_size=2, home=home.endpoint)
    stages = [
        fleet.register(daemon, msgspec.structs.replace(spec, pp_rank=pp_rank))
        for pp_rank, daemon in enumerate((home, member))
    ]
    sinks = fleet.engine(decode, spec_of("decode"))
    pull_and_check(sinks, publish(stages, 1), 1)


def test_a_reference_is_followed_only_to_daemons_that_are_allowed(fleet: Fleet, ring: Ring):
    prefill = fleet.daemon("prefill", *ring.flags("p", "any"))
    decode = fleet.daemon("decode", *ring.flags("d", "other"))
    (source,) = fleet.engine(prefill, spec_of("prefill"))
    (sink,) = fleet.engine(decode, spec_of("decode"))
    ref = publish([source], 1)
    stranger = refusal_of(sink, ref)
    assert (stranger["code"], "peer.curve_allowed_keys" in stranger["message"]) == ("not-allowed", True)
    bare = refusal_of(sink, ref | {"endpoint": address_of(ref["endpoint"])})
    assert (bare["code"], "no public key" in bare["message"]) == ("not-allowed", True)
    # A key that is allowed, where somebody else answers: the handshake comes to nothing.
    forged = refusal_of(sink, ref | {"endpoint": f"{address_of(ref['endpoint'])}#{ring.public('other')}"})
    assert forged["code"] in ("peer-unreachable", "deadline")


def test_a_daemon_whose_key_is_not_listed_is_turned_away_and_the_log_says_so(fleet: Fleet, ring: Ring):
    prefill = fleet.daemon("prefill", *ring.flags("p", "other"))
    decode = fleet.daemon("decode", *ring.flags("d", "p"))
    (source,) = fleet.engine(prefill, spec_of("prefill"))
    (sink,) = fleet.engine(decode, spec_of("decode"))
    assert refusal_of(sink, publish([source], 1))["code"] in ("peer-unreachable", "deadline")
    assert f"its key {ring.public('d')} is not in peer.curve_allowed_keys" in prefill.log.read_text()


def test_a_daemon_without_a_key_says_that_it_needs_one(fleet: Fleet, ring: Ring):
    prefill = fleet.daemon("prefill", *ring.flags("p", "any"))
    decode = fleet.daemon("decode")
    (source,) = fleet.engine(prefill, spec_of("prefill"))
    (sink,) = fleet.engine(decode, spec_of("decode"))
    assert "peer.curve_secret_key_file" in refusal_of(sink, publish([source], 1))["message"]


def greets(daemon: Daemon, server_key: str = "", key: tuple[bytes, bytes] | None = None) -> bool:
    """Whether the daemon answers a bare peer, in the clear or with that key pair (Z85)."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        if key is not None:
            dealer.curve_serverkey = bytes.fromhex(server_key)
            dealer.curve_publickey, dealer.curve_secretkey = key
        dealer.connect(address_of(daemon.endpoint))
        dealer.send(
            encode(PeerHello(request=1, versions=PEER_VERSIONS, boot="b", endpoint="tcp://127.0.0.1:1"))
        )
        if not dealer.poll(REFUSED_MS):
            return False
        return isinstance(PEER_MESSAGES.decode(dealer.recv()), PeerWelcome)
    finally:
        dealer.close(linger=0)
        context.term()


def test_the_peer_socket_answers_allowed_keys_alone(fleet: Fleet, ring: Ring):
    friend, stranger = zmq.curve_keypair(), zmq.curve_keypair()
    ring._public["friend"] = z85.decode(friend[0]).hex()
    daemon = fleet.daemon("node", *ring.flags("n", "friend"))
    own = ring.public("n")
    assert greets(daemon, own, friend)
    assert not greets(daemon)
    assert not greets(daemon, own, stranger)
    assert not greets(daemon, ring._public["friend"], friend)  # not this daemon's key
    assert daemon.log.read_text().count("peer turned away") == 1  # the three of one address, once


@pytest.mark.parametrize(
    ("networks", "answered"), [("10.9.0.0/16", False), ("10.9.0.0/16,127.0.0.0/8", True)]
)
def test_addresses(fleet: Fleet, networks, answered):
    # Bound to one loopback address and asked from another, so that it is not its own.
    daemon = fleet.daemon("node", "--peer-bind", "tcp://127.0.0.5:0", "--peer-allowed-addresses", networks)
    assert greets(daemon) is answered
