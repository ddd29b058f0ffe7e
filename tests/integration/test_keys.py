"""Peers by key and by address: who is let in, who is not and why; and lists that change meanwhile."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvxferd.control.curve_keys import CurveKeyPair, make_key
from kvxferd.wire.endpoint import address_of
from kvxferd.wire.peer import PeerWelcome
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.fleet import Fleet
from tests.support.nodes.rank_process import RankProcess
from tests.support.nodes.requests import publish, pull_and_check, spec_of
from tests.support.nodes.waiting import wait_until
from tests.support.raw_peer import PeerByHand, stranger_key

REFUSED_S = 0.8  # nothing comes back; this is how long nothing is waited for
# Shared daemons, and who may greet each. `changing` is of a test's own; a daemon logs who is turned away
# three times in 10 s for each address: `prefill` and `member` have one test each that looks for that.
ADMITTED = {
    "prefill": ("decode", "member"),
    "decode": ("prefill", "member", "changing"),
    "member": ("prefill", "friend"),
    "open": ("any",),
}


class Ring:
    """The keys of a session, by name. `friend` is no daemon."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.friend = stranger_key()
        self.public = {name: make_key(self.file(name)).public for name in (*ADMITTED, "changing")}
        self.public |= {"any": "any", "friend": self.friend.public}

    def file(self, name: str) -> Path:
        return self.directory / f"{name}.key"

    def daemon(self, fleet: Fleet, name: str) -> Daemon:
        admitted = ",".join(self.public[other] for other in ADMITTED[name])
        secret = str(self.file(name))
        return fleet.shared(
            name, KVXFERD_PEER_CURVE_SECRET_KEY_FILE=secret, KVXFERD_PEER_CURVE_ALLOWED_KEYS=admitted
        )


@pytest.fixture(scope="session")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Ring:
    return Ring(tmp_path_factory.mktemp("keys"))


def refusal_of(sink: RankProcess, ref: dict[str, Any]) -> dict[str, Any]:
    name, fields = sink.end_of(sink.pull(ref, list(range(32)), 500, 2.0))
    assert name == "Failed"
    assert fields["safe_to_reuse"]
    return fields


def test_an_engine_on_two_nodes_and_its_reader_by_keys(fleet: Fleet, ring: Ring) -> None:
    home, member = ring.daemon(fleet, "prefill"), ring.daemon(fleet, "member")
    spec = spec_of("prefill", pp_size=2, home=home.endpoint)
    stages = [
        fleet.register(daemon, msgspec.structs.replace(spec, pp_rank=pp_rank))
        for pp_rank, daemon in enumerate((home, member))
    ]
    sinks = fleet.engine(ring.daemon(fleet, "decode"), spec_of("decode", tp_size=2))
    pull_and_check(sinks, publish(stages, 1), 1)
    for stage in stages:
        assert stage.await_event("Released")["why"] == "completed"
    (engine,) = home.status()["engines"]
    assert engine["complete"]
    assert [rank["state"] for rank in engine["ranks"]] == ["ready", "remote"]


def test_a_reference_is_followed_only_to_daemons_that_are_allowed(fleet: Fleet, ring: Ring) -> None:
    source, sink = fleet.pair(ring.daemon(fleet, "open"), ring.daemon(fleet, "decode"))
    ref = publish([source], 1)
    stranger = refusal_of(sink, ref)
    assert (stranger["code"], "peer.curve_allowed_keys" in stranger["message"]) == ("not-allowed", True)
    bare = refusal_of(sink, ref | {"endpoint": address_of(ref["endpoint"])})
    assert (bare["code"], "no public key" in bare["message"]) == ("not-allowed", True)
    # A key that is allowed, where somebody else answers: the handshake comes to nothing.
    elsewhere = f"{address_of(ref['endpoint'])}#{ring.public['member']}"
    assert refusal_of(sink, ref | {"endpoint": elsewhere})["code"] in ("peer-unreachable", "deadline")


def test_a_daemon_whose_key_is_not_listed_is_turned_away_and_finds_out_why(
    fleet: Fleet, ring: Ring, tmp_path: Path
) -> None:
    """The source's log has the reason, and the reader's status a command that tells it as it is pasted."""
    config = tmp_path / "reader.toml"
    config.write_text(
        f'[peer]\ncurve_secret_key_file = "{ring.file("changing")}"\n'
        f'curve_allowed_keys = ["{ring.public["prefill"]}"]\n'
    )
    prefill, reader = ring.daemon(fleet, "prefill"), fleet.daemon("reader", "--config", str(config))
    source, sink = fleet.pair(prefill, reader)
    assert refusal_of(sink, publish([source], 1))["code"] in ("peer-unreachable", "deadline")
    assert f"its key {ring.public['changing']} is not in peer.curve_allowed_keys" in prefill.log_text()
    wait_until(lambda: remedy_at(reader), "a sample has the failed pull")
    _, command, _ = re.split("`(kvxferd ping [^`]+)`", remedy_at(reader))
    kvxferd = shlex.quote(str(Path(sys.executable).with_name("kvxferd")))
    done = subprocess.run(
        f"{kvxferd} {command.removeprefix('kvxferd ')}",
        shell=True, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert "key-refused" in done.stdout, done
    assert "does not admit this node's key" in done.stdout


def remedy_at(daemon: Daemon) -> str:
    return str(daemon.control.get("/v1/status")["verdict"]["remedy"])


def test_a_daemon_without_a_key_says_that_it_needs_one(fleet: Fleet, ring: Ring) -> None:
    source, sink = fleet.pair(ring.daemon(fleet, "open"), fleet.shared("bare"))
    assert "peer.curve_secret_key_file" in refusal_of(sink, publish([source], 1))["message"]


def greets(
    daemon: Daemon, server_key: str = "", key: CurveKeyPair | None = None, limit_s: float = 30.0
) -> bool:
    """Whether the daemon answers a bare peer, in the clear or with that key pair."""
    bare = PeerByHand(f"{address_of(daemon.endpoint)}#{server_key}", key, greet=False)
    try:
        bare.say(bare.greeting())
        return isinstance(bare.next(limit_s), PeerWelcome)
    finally:
        bare.close()


def test_the_peer_socket_answers_allowed_keys_alone(fleet: Fleet, ring: Ring) -> None:
    daemon, own = ring.daemon(fleet, "member"), ring.public["member"]
    assert greets(daemon, own, ring.friend)
    assert not greets(daemon, limit_s=REFUSED_S)
    assert not greets(daemon, own, stranger_key(), REFUSED_S)
    assert not greets(daemon, ring.public["friend"], ring.friend, REFUSED_S)  # not this daemon's key
    assert len(daemon.logged("peer turned away")) == 1  # the three of one address, once


def test_addresses(fleet: Fleet, tmp_path: Path) -> None:
    file = tmp_path / "kvxferd.toml"
    file.write_text('[peer]\nallowed_addresses = ["10.9.0.0/16"]\n')
    # Bound to one loopback address and asked from another, so that it is not its own.
    daemon = fleet.daemon("node", "--peer-bind", "tcp://127.0.0.5:0", "--config", str(file))
    assert not greets(daemon, limit_s=REFUSED_S)
    file.write_text('[peer]\nallowed_addresses = ["10.9.0.0/16", "127.0.0.0/8"]\n')
    assert daemon.verb("reload").returncode == 0
    assert greets(daemon)


def test_a_peer_whose_key_is_taken_back_is_cut_off_and_let_in_again(
    fleet: Fleet, ring: Ring, tmp_path: Path
) -> None:
    file = tmp_path / "prefill.toml"

    def allow(name: str) -> None:
        keys = f'curve_secret_key_file = "{ring.file("changing")}"\n'
        file.write_text(f'[peer]\n{keys}curve_allowed_keys = ["{ring.public[name]}"]\n')

    allow("decode")
    prefill = fleet.daemon("prefill", "--config", str(file))
    source, sink = fleet.pair(prefill, ring.daemon(fleet, "decode"))
    pull_and_check([sink], publish([source], 1), 1)
    source.await_event("Released")

    allow("member")
    assert prefill.verb("reload").returncode == 0
    wait_until(lambda: prefill.logged("peer connections closed"), "its connection is closed")
    assert prefill.logged("peer connections closed")[-1]["connections"] == 1
    assert refusal_of(sink, publish([source], 2))["code"] in ("peer-unreachable", "deadline")
    wait_until(lambda: prefill.logged("peer turned away"), "its connections are refused")

    allow("decode")
    done = prefill.verb("reload")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "changed: peer.curve_allowed_keys"), done
    pull_and_check([sink], publish([source], 3), 3)


def test_a_key_in_the_watched_file_is_admitted_and_removed_without_a_reload(
    fleet: Fleet, ring: Ring, tmp_path: Path
) -> None:
    other = ring.public["decode"]
    listed = tmp_path / "allowed-keys"
    listed.write_text("# no other node yet\n")
    flags = ("--peer-curve-secret-key-file", str(ring.file("changing")))
    prefill = fleet.daemon("prefill", *flags, "--peer-curve-allowed-keys-file", str(listed))
    source, sink = fleet.pair(prefill, ring.daemon(fleet, "decode"))

    listed.write_text(f"{other}  # decode\n")
    wait_until(lambda: prefill.logged("allowed keys read"), "its key is admitted")
    assert prefill.logged("allowed keys read")[-1]["added"] == [other]
    pull_and_check([sink], publish([source], 2), 2)

    listed.write_text("")
    wait_until(lambda: prefill.logged("allowed keys not read"), "an empty file is not taken")
    wait_until(lambda: "it is empty" in str(prefill.control.get("/v1/status")["warnings"]), "it is a warning")
    pull_and_check([sink], publish([source], 3), 3)

    listed.write_text("# decode is gone\n")
    wait_until(lambda: len(prefill.logged("allowed keys read")) > 1, "its key is removed")
    removed = prefill.logged("allowed keys read")[-1]
    assert (removed["removed"], removed["closes_connections"]) == ([other], True)
    assert refusal_of(sink, publish([source], 4))["code"] in ("peer-unreachable", "deadline")
    wait_until(lambda: prefill.logged("peer turned away"), "its connections are refused")


def test_its_own_address_is_let_in_always(fleet: Fleet, tmp_path: Path) -> None:
    file = tmp_path / "decode.toml"
    file.write_text('[peer]\nallowed_addresses = ["127.0.0.0/8"]\n')
    decode = fleet.daemon("decode", "--config", str(file))
    source, sink = fleet.pair(fleet.shared("prefill"), decode)
    pull_and_check([sink], publish([source], 1), 1)
    file.write_text('[peer]\nallowed_addresses = ["127.0.0.2/32"]\n')
    done = decode.verb("reload")
    assert done.returncode == 0
    # Here it is the other's too: the peer stays.
    assert "dropped" not in done.stdout
    assert decode.status()["peers"]
