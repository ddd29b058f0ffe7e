"""Authenticates connections to the peer socket: libzmq sends ZAP requests (RFC 27), and this replies.

It runs on the event loop, without a thread: libzmq's I/O thread does not wait, it only holds back the one
connection until the reply, so a new peer waits one turn of the loop. pyzmq's own authenticators need a
thread, or zmq.asyncio sockets beside the ones that this daemon watches itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import structlog

from kvxferd.core.allowlist import NOT_IN_LISTS, PeerAllowlist

log = structlog.get_logger()

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"kvxferd"
# Status codes of a refusal. libzmq knows four, and a client of any version treats these two alike.
REFUSED_KEY, REFUSED_ADDRESS = b"400", b"500"


class _Rejection(NamedTuple):
    status: bytes
    text: str


class ZapAuthenticator:
    """Replies to libzmq's ZAP requests about connections to this node."""

    def __init__(
        self,
        allowlist: PeerAllowlist,
        on_rejection: Callable[[str, str, float], None] = lambda address, reason, now: None,
    ) -> None:
        """`on_rejection` gets each refused connection's address, the reason and the time."""
        self.allowlist = allowlist
        self._on_rejection = on_rejection

    def reply(self, parts: list[bytes], now: float) -> list[bytes] | None:
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
            self._on_rejection(name, problem.text, now)
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
