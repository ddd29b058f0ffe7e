"""`kvxferd ping`: each way in which a daemon cannot be reached has an outcome and a remedy."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from kvxferd.cli.root import root
from kvxferd.control.curve_keys import CurveKeyPair, make_key
from kvxferd.core.allowlist import ALLOW_ALL, PeerAllowlist
from kvxferd.doctor.ping import FAILURES, Outcome, Ping, _refused, find_endpoint, ping
from kvxferd.errors import KvxferdError
from kvxferd.ids import Endpoint
from kvxferd.tooling.control_client import ControlClient
from kvxferd.wire import peer as peer_wire
from kvxferd.wire.common import Versions
from kvxferd.wire.endpoint import with_key
from kvxferd.wire.peer import PEER_VERSIONS
from tests.support.repository import ROOT
from tests.support.served_peer import served_peer

ELSEWHERE = (ip_network("10.0.0.0/8"),)
SHORT_S = 1.0
KEY = "ab" * 32


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, CurveKeyPair]:
    return {name: make_key(tmp_path / name) for name in ("here", "there", "other")}


def lists(own: CurveKeyPair, *allowed: CurveKeyPair) -> PeerAllowlist:
    return PeerAllowlist(own_key=own.public, allowed_keys=frozenset(key.public for key in allowed))


def failed(result: Ping, outcome: Outcome) -> None:
    assert result.outcome is outcome, result
    assert result.message
    assert result.remedy


def test_keys_that_are_admitted_refused_wrong_and_missing(keys: dict[str, CurveKeyPair]) -> None:
    here, there, other = keys["here"], keys["there"], keys["other"]
    knows_both = lists(here, there, other)
    with served_peer(lists(there, here), there) as peer:
        endpoint = with_key(peer.address, there.public)
        assert ping(endpoint, lists(here, there), here).outcome is Outcome.OK
        failed(ping(endpoint, lists(here, other), here), Outcome.NOT_ALLOWED_HERE)
        failed(ping(with_key(peer.address, other.public), knows_both, here), Outcome.WRONG_SERVER_KEY)
        failed(ping(peer.address, ALLOW_ALL, None), Outcome.NEEDS_KEY)
        failed(ping(endpoint, lists(other, there), other), Outcome.KEY_REFUSED)
    with served_peer() as peer:
        failed(ping(with_key(peer.address, there.public), lists(here, there), here), Outcome.HAS_NO_KEY)


def test_an_address_that_is_refused(keys: dict[str, CurveKeyPair]) -> None:
    here, there = keys["here"], keys["there"]
    with served_peer(PeerAllowlist(networks=ELSEWHERE)) as peer:
        failed(ping(peer.address, ALLOW_ALL, None), Outcome.ADDRESS_REFUSED)
    with served_peer(replace(lists(there, here), networks=ELSEWHERE), there) as peer:
        result = ping(with_key(peer.address, there.public), lists(here, there), here)
        failed(result, Outcome.ADDRESS_REFUSED)


def test_an_event_loop_that_hangs() -> None:
    with served_peer() as peer, peer.hung():
        failed(ping(peer.address, ALLOW_ALL, None, timeout_s=SHORT_S), Outcome.NO_REPLY)


def test_versions_without_one_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = Versions(PEER_VERSIONS.newest + 1, PEER_VERSIONS.newest + 2)
    monkeypatch.setattr(peer_wire, "PEER_VERSIONS", newer)
    with served_peer() as peer:
        result = ping(peer.address, ALLOW_ALL, None)
    failed(result, Outcome.BAD_VERSION)
    assert f"this one speaks {newer}; upgrade the older" in result.message
    assert f"of protocol version {PEER_VERSIONS}:" in result.message


@contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[Endpoint]:
    """Accept each connection and serve it; `serve` gets the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    serve(connection)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield Endpoint(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(20)
            assert not thread.is_alive()


def test_other_things_that_listen() -> None:
    with listening(lambda c: c.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as endpoint:
        failed(ping(endpoint, ALLOW_ALL, None), Outcome.NOT_A_DAEMON)
    with listening(lambda c: None) as endpoint:
        failed(ping(endpoint, ALLOW_ALL, None), Outcome.NOT_A_DAEMON)
    with socket.create_server(("127.0.0.1", 0)) as listener:  # as a process that is stopped
        endpoint = Endpoint(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        failed(ping(endpoint, ALLOW_ALL, None, timeout_s=SHORT_S), Outcome.NO_REPLY)
    failed(ping(endpoint, ALLOW_ALL, None), Outcome.NOTHING_LISTENS)
    unknown = Endpoint("tcp://no-such-host.invalid:9441")
    failed(ping(unknown, ALLOW_ALL, None), Outcome.NAME_UNKNOWN)


def _send_parts_without_end(connection: socket.socket) -> None:
    """Finish the handshake of ZMTP, and send parts of a message that has no last one."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    socket_type = b"\x05READY\x0bSocket-Type" + (6).to_bytes(4) + b"ROUTER"
    part = b"\x03" + (60_000).to_bytes(8) + bytes(60_000)  # flags: long, more follow
    with suppress(OSError):  # the other side has had enough
        connection.settimeout(20)
        connection.sendall(greeting)
        with connection.makefile("rb") as stream:
            stream.read(len(greeting) + 1)  # its greeting, and the first byte of its READY
            connection.sendall(bytes([4, len(socket_type)]) + socket_type)
            while True:
                connection.sendall(part)


def test_a_message_without_end_is_not_kept() -> None:
    """libzmq keeps every part of a message until the last: it would be gigabytes in the time of a ping."""
    with listening(_send_parts_without_end) as endpoint:
        result = ping(endpoint, ALLOW_ALL, None, timeout_s=20)
    failed(result, Outcome.NO_REPLY)
    assert "which are no reply" in result.message


def test_each_failure_has_a_meaning_and_a_remedy_and_the_manual_names_it() -> None:
    assert set(FAILURES) == set(Outcome) - {Outcome.OK}
    manual = (ROOT / "docs/how-to/when-something-is-wrong.md").read_text()
    section = manual.partition("### Reach another node")[2].partition("\n#")[0]
    assert [outcome for outcome in FAILURES if f"`{outcome}`" not in section] == []


def test_the_verb_says_who_answered_how_fast_or_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFERD_PEER_ADVERTISE", "")
    with served_peer() as peer:
        address = peer.address.removeprefix("tcp://")
        shown = CliRunner().invoke(root, ["ping", address, "--count", "2"])
        assert shown.exit_code == 0
        assert "[ok]" in shown.stdout
        assert "round trips: 2" in shown.stdout
        found = json.loads(CliRunner().invoke(root, ["ping", address, "--count", "5", "--json"]).stdout)
    assert (found["outcome"], found["status"]) == ("ok", 0)
    assert (found["boot"], found["software_there"]) == ("there", "1.2.3")
    assert msgspec.convert(found["versions_there"], Versions) == PEER_VERSIONS
    assert found["version"] == PEER_VERSIONS.newest
    assert len(found["round_trips_s"]) == 5
    assert all(0 < trip_s < 5.0 for trip_s in found["round_trips_s"])
    refused = CliRunner().invoke(root, ["ping", address])
    assert refused.exit_code == 1
    assert "[nothing-listens]" in refused.stdout
    assert "to do: " in refused.stdout
    assert CliRunner().invoke(root, ["ping", "ipc:///tmp/x"]).exit_code == 2


class Daemon(ControlClient):
    """A local daemon that knows one peer."""

    def get(self, path: str) -> Any:
        assert path == "/v1/peers"
        engines = [{"engine_id": "prefill-0", "generation": "1", "num_ranks": 2}]
        return {"peers": [{"endpoint": f"tcp://10.0.0.2:9441#{KEY}", "engines": engines}]}


@pytest.mark.parametrize(
    ("name", "endpoint"),
    [
        ("prefill-0", f"tcp://10.0.0.2:9441#{KEY}"),
        ("10.0.0.2:9441", f"tcp://10.0.0.2:9441#{KEY}"),
        ("tcp://10.0.0.2:9441", f"tcp://10.0.0.2:9441#{KEY}"),
        ("10.0.0.3:9441", "tcp://10.0.0.3:9441"),
        (f"tcp://10.0.0.2:9441#{'ef' * 32}", f"tcp://10.0.0.2:9441#{'ef' * 32}"),
    ],
)
def test_a_name_stands_for_a_peer_that_the_daemon_knows(name: str, endpoint: str) -> None:
    assert find_endpoint(name, Daemon("/nowhere")) == endpoint


def test_without_a_daemon_a_name_is_an_endpoint() -> None:
    nobody = ControlClient("/nowhere/control.sock")
    assert find_endpoint("10.0.0.2:9441", nobody) == "tcp://10.0.0.2:9441"
    with pytest.raises(KvxferdError, match="prefill-0"):
        find_endpoint("prefill-0", nobody)


@pytest.mark.parametrize("status", [200, 299, 404, 999])
def test_a_refusal_with_a_status_that_no_daemon_sends(status: int) -> None:
    found = _refused(str(status).encode(), has_key=True)
    assert found.outcome is Outcome.NOT_A_DAEMON
    assert str(status) in found.message
