"""Which daemons this one exchanges messages with, by public key and by address."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from kvxferd.errors import Code, EngineError
from kvxferd.ids import Endpoint
from kvxferd.wire.endpoint import address_of, host_of, key_of

NOT_IN_LISTS = "not in peer.curve_allowed_keys, nor in the file of peer.curve_allowed_keys_file"

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAllowlist:
    """The allow-lists. Without any, every daemon that can be reached is a peer."""

    own_key: str = ""  # this daemon's own public key, 64 hex digits; "": no CURVE
    allowed_keys: frozenset[str] | None = frozenset()  # besides its own; None: any
    networks: tuple[Network, ...] = ()  # peers' addresses; empty: any

    def allows_key(self, key: str) -> bool:
        """Whether a daemon that proved to hold this key may be a peer."""
        return self.allowed_keys is None or key == self.own_key or key in self.allowed_keys

    def allows_all_of(self, other: PeerAllowlist) -> bool:
        """Whether these lists admit every peer that `other` admits."""
        keys = self.allowed_keys
        if keys is not None and (other.allowed_keys is None or other.allowed_keys - keys):
            return False
        return not self.networks or (bool(other.networks) and set(other.networks) <= set(self.networks))

    def allows_address(self, address: str) -> bool:
        """Whether a connection from or to this numeric address is admitted."""
        if not self.networks:
            return True
        try:
            found = ipaddress.ip_address(address)
        except ValueError:
            return False
        if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
            found = found.ipv4_mapped  # how a socket for both families names an IPv4 peer
        return any(found in network for network in self.networks)

    def check(self, endpoint: Endpoint) -> None:
        """Raise EngineError(not-allowed) where this daemon must not send requests to that endpoint.

        Endpoints come from references and from engines' homes. A worker that invents one must not make the
        daemon connect to any host, nor in the clear where keys are used.
        """
        key = key_of(endpoint)
        problem = ""
        if self.own_key and not key:
            problem = (
                f"it names no public key, and this daemon speaks by CURVE only; give {endpoint}#KEY, as that "
                "daemon's `kvxferd status` shows it"
            )
        elif key and not self.own_key:
            problem = "it wants CURVE, and this daemon has no key; set peer.curve_secret_key_file"
        elif key and not self.allows_key(key):
            problem = f"its key {key} is {NOT_IN_LISTS}"
        elif self.networks and not self.allows_address(host_of(endpoint)):
            problem = "its address is not in peer.allowed_addresses, which take numeric addresses alone"
        if problem:
            raise EngineError(f"cannot reach {address_of(endpoint)}: {problem}", Code.NOT_ALLOWED)


ALLOW_ALL = PeerAllowlist()
