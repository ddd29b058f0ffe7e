"""Peer endpoints: parsed and rebuilt, never passed through unchecked.

An endpoint is ``tcp://HOST:PORT``, or ``tcp://HOST:PORT#KEY`` for a daemon that accepts CURVE only;
KEY is its public key in 64 hex digits. So a process that reads a daemon's address, in a reference or
in an engine's `home`, also reads the key that the daemon must prove.
"""

from __future__ import annotations

import re
from functools import lru_cache

from kvxferd.errors import Code, EngineError
from kvxferd.ids import Endpoint

KEY_DIGITS = 64  # a Curve25519 public key of 32 bytes

# A host name, an IPv4 address, or an IPv6 address in brackets. libzmq understands much more
# (ipc://, wildcards, source addresses): none of that is accepted from outside.
_ENDPOINT = re.compile(
    r"tcp://(?P<host>[A-Za-z0-9][A-Za-z0-9.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\]):(?P<port>[0-9]{1,5})"
    rf"(?:#(?P<key>[0-9A-Fa-f]{{{KEY_DIGITS}}}))?"
)


@lru_cache(maxsize=1024)  # each reference to a transfer has one, and there are few
def parse_endpoint(text: str) -> Endpoint:
    """Return the endpoint in its canonical spelling. Raises EngineError(endpoint-invalid)."""
    match = _ENDPOINT.fullmatch(text)
    if match is None or not 1 <= (port := int(match["port"])) <= 65535:
        raise EngineError(
            f"cannot reach {text[:80]!r}: a peer endpoint is tcp://HOST:PORT or tcp://HOST:PORT#KEY",
            Code.ENDPOINT_INVALID,
        )
    return with_key(Endpoint(f"tcp://{match['host'].lower()}:{port}"), (match["key"] or "").lower())


def with_key(address: Endpoint, key: str) -> Endpoint:
    """Return the endpoint of the daemon at that address that has this public key; "" for no key."""
    return Endpoint(f"{address}#{key}") if key else address


def address_of(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint without its key: the address that a socket connects to."""
    return Endpoint(endpoint.partition("#")[0])


def key_of(endpoint: Endpoint) -> str:
    """Return the public key that the daemon there must prove; "" where none is named."""
    return endpoint.partition("#")[2]


def host_of(endpoint: Endpoint) -> str:
    """Return the host, an IPv6 address without its brackets."""
    return address_of(endpoint).removeprefix("tcp://").rpartition(":")[0].strip("[]")
