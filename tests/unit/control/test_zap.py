"""What libzmq is told of who wants to connect."""

from __future__ import annotations

import re
import time
from ipaddress import ip_network

import pytest
import structlog

from kvxferd.control.zap import TURNED_AWAY_FOR_S, ZapAuthenticator
from kvxferd.core.allowlist import PeerAllowlist
from kvxferd.telemetry.log_limits import MAX_LINES_PER_SOURCE, LogRateLimiter, RateLimitProcessor

FRIEND, STRANGER = b"\x0b" * 32, b"\x0c" * 32
KEYS = PeerAllowlist(own_key="0a" * 32, allowed_keys=frozenset([FRIEND.hex()]))
LAN = PeerAllowlist(networks=(ip_network("10.1.0.0/16"),))
BOTH = PeerAllowlist(own_key="0a" * 32, allowed_keys=frozenset([FRIEND.hex()]), networks=LAN.networks)


def request(address: str, mechanism: bytes, *credentials: bytes) -> list[bytes]:
    return [b"route", b"", b"1.0", b"7", b"kvxferd", address.encode(), b"", mechanism, *credentials]


@pytest.mark.parametrize(
    ("trust", "address", "mechanism", "credentials", "allowed"),
    [
        (LAN, "10.1.2.3", b"NULL", [], True),
        (LAN, "::ffff:10.1.2.3", b"NULL", [], True),
        (LAN, "10.2.2.3", b"NULL", [], False),
        (LAN, "nonsense", b"NULL", [], False),
        (KEYS, "10.2.2.3", b"CURVE", [FRIEND], True),
        (KEYS, "10.2.2.3", b"CURVE", [STRANGER], False),
        (KEYS, "10.2.2.3", b"NULL", [], False),
        (KEYS, "10.2.2.3", b"PLAIN", [FRIEND, b""], False),
        (KEYS, "10.2.2.3", b"CURVE", [], False),
        (BOTH, "10.1.2.3", b"CURVE", [FRIEND], True),
        (BOTH, "10.2.2.3", b"CURVE", [FRIEND], False),
    ],
)
def test_who_is_let_in(trust, address, mechanism, credentials, allowed) -> None:
    reply = ZapAuthenticator(trust).reply(request(address, mechanism, *credentials))
    route, empty, version, number, status, _, user, metadata = reply
    assert (route, empty, version, number, metadata) == (b"route", b"", b"1.0", b"7", b"")
    refused = b"400" if trust.allows_address(address) else b"500"  # `kvxferd ping` tells them apart
    assert status == (b"200" if allowed else refused)
    assert bool(user) is (allowed and mechanism == b"CURVE")


@pytest.mark.parametrize(
    "parts", [[], [b"x"], [b"r", b"", b"2.0", *[b""] * 6], [b"r", b"x", b"1.0", *[b""] * 6]]
)
def test_what_is_no_request_gets_no_answer(parts: list[bytes]) -> None:
    assert ZapAuthenticator(KEYS).reply(parts) is None


def test_who_tries_again_and_again_does_not_fill_the_log() -> None:
    doorkeeper = ZapAuthenticator(LAN)
    limiter = RateLimitProcessor(LogRateLimiter(lambda: 0.0))
    with structlog.testing.capture_logs(processors=[limiter]) as lines:
        for _ in range(5000):
            doorkeeper.reply(request("192.0.2.1", b"NULL"))
        doorkeeper.reply(request("192.0.3.1", b"NULL"))
    assert [line["address"] for line in lines] == ["192.0.2.1"] * MAX_LINES_PER_SOURCE + ["192.0.3.1"]


def test_a_peer_that_is_turned_away_is_a_warning_for_a_minute() -> None:
    doorkeeper = ZapAuthenticator(LAN)
    assert doorkeeper.warnings() == []
    doorkeeper.reply(request("192.0.2.1", b"NULL"))
    (finding,) = doorkeeper.warnings()
    assert "192.0.2.1, its address is not in peer.allowed_addresses" in finding.message
    for setting in ("curve_allowed_keys", "curve_allowed_keys_file", "allowed_addresses"):
        assert re.search(rf"peer\.{setting}\b", finding.remedy)
    assert doorkeeper.warnings(time.monotonic() + 0.1 + TURNED_AWAY_FOR_S) == []
