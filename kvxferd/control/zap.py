"""Authenticates connections to the peer socket: libzmq sends ZAP requests (RFC 27), and this replies.

It runs on the event loop, without a thread: libzmq's I/O thread does not wait, it only holds back the one
connection until the reply, so a new peer waits one turn of the loop. pyzmq's own authenticators need a
thread, or zmq.asyncio sockets beside the ones that this daemon watches itself.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import structlog

from kvxferd.core.allowlist import NOT_IN_LISTS, PeerAllowlist
from kvxferd.telemetry.warnings import NodeWarning, WarningKind

log = structlog.get_logger()

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"kvxferd"
# Status codes of a refusal. libzmq knows four, and a client of any version treats these two alike.
REFUSED_KEY, REFUSED_ADDRESS = b"400", b"500"
# A peer that was refused is a warning for so long: daemons connect again each few seconds.
TURNED_AWAY_FOR_S = 60.0


class _Rejection(NamedTuple):
    status: bytes
    text: str


class ZapAuthenticator:
    """Replies to libzmq's ZAP requests about connections to this node."""

    def __init__(self, allowlist: PeerAllowlist) -> None:
        self.allowlist = allowlist
        # Anybody may cause rejections: the last one is kept. When it was, the address and the reason.
        self._last_rejection = float("-inf"), "", ""

    def warnings(self, now: float | None = None) -> list[NodeWarning]:
        """Return a warning if a peer was refused in the last minute: another node's pulls fail for it."""
        at, address, reason = self._last_rejection
        if (time.monotonic() if now is None else now) - at > TURNED_AWAY_FOR_S:
            return []
        message = f"this node turns a peer away, and that node's pulls from here fail: {address}, {reason}"
        remedy = (
            "if it is a node of yours, add what is missing here: its key to peer.curve_allowed_keys or to "
            "the file of peer.curve_allowed_keys_file, its address to peer.allowed_addresses: "
            "docs/how-to/keys.md"
        )
        return [NodeWarning(WarningKind.PEER_TURNED_AWAY, "", message, remedy)]

    def reply(self, parts: list[bytes]) -> list[bytes] | None:
        """Return the reply to one ZAP request, with its envelope; None if it is no valid request."""
        try:
            route, empty, version, request, _, address, _, mechanism, *credentials = parts
        except ValueError:
            return None
        if empty or version != b"1.0":
            return None
        name = address.decode(errors="replace")
        problem = self._rejection_reason(name, mechanism, credentials)
        if problem:
            self._last_rejection = time.monotonic(), name, problem.text
            log.warning("peer turned away", limit_by=name, address=name, reason=problem.text)
        # Only the log here has the reason. The refused client gets a status: whether its address or its key
        # is refused, for `kvxferd ping`.
        status, text = (problem.status, b"not allowed") if problem else (b"200", b"")
        key = credentials[0].hex().encode() if mechanism == b"CURVE" and credentials else b""
        return [route, b"", b"1.0", request, status, text, b"" if problem else key, b""]

    def _rejection_reason(
        self, address: str, mechanism: bytes, credentials: list[bytes]
    ) -> _Rejection | None:
        if not self.allowlist.allows_address(address):
            return _Rejection(REFUSED_ADDRESS, "its address is not in peer.allowed_addresses")
        if not self.allowlist.own_key:
            return None
        if mechanism != b"CURVE" or len(credentials) != 1:
            return _Rejection(REFUSED_KEY, "it does not speak CURVE")
        key = credentials[0].hex()
        if self.allowlist.allows_key(key):
            return None
        return _Rejection(REFUSED_KEY, f"its key {key} is {NOT_IN_LISTS}")
