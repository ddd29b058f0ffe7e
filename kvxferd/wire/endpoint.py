"""Peer endpoints: parsed and rebuilt, never handed through."""

from __future__ import annotations

import re

from kvxferd.errors import Code, EngineError
from kvxferd.ids import Endpoint

# A host name, an IPv4 address, or an IPv6 address in brackets. libzmq understands much more
# (ipc://, wildcards, source addresses): none of it comes from outside.
_ENDPOINT = re.compile(
    r"tcp://(?P<host>[A-Za-z0-9][A-Za-z0-9.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\]):(?P<port>[0-9]{1,5})"
)


def parse_endpoint(text: str) -> Endpoint:
    """Return the endpoint in its one spelling. Raises EngineError(endpoint-invalid)."""
    match = _ENDPOINT.fullmatch(text)
    port = int(match["port"]) if match else 0
    if match is None or not 1 <= port <= 65535:
        raise EngineError(
            f"cannot reach {text[:80]!r}: a peer endpoint is tcp://HOST:PORT", Code.ENDPOINT_INVALID
        )
    return Endpoint(f"tcp://{match['host'].lower()}:{port}")
