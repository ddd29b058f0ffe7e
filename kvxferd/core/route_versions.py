"""What each connection that another daemon opened to this node agreed on in its greeting."""

from __future__ import annotations

from typing import NamedTuple

from kvxferd.ids import Endpoint

NO_ENDPOINT = Endpoint("")

# As many as the peer socket accepts connections at a time. 16,384 entries are about 6 MB.
MAX_ROUTES = 16_384


class _Greeting(NamedTuple):
    version: int
    endpoint: Endpoint


# Version 1 did not require the greeting first.
_DEFAULT = _Greeting(version=1, endpoint=NO_ENDPOINT)


class RouteVersions:
    """Keeps the greetings of the routes that were used last."""

    def __init__(self) -> None:
        self._greetings: dict[bytes, _Greeting] = {}

    def set_version(self, route: bytes, version: int, endpoint: Endpoint = NO_ENDPOINT) -> None:
        """Record the version that the two sides agreed on, and where the other one is."""
        self._greetings.pop(route, None)
        self._greetings[route] = _Greeting(version, endpoint)
        if len(self._greetings) > MAX_ROUTES:
            del self._greetings[next(iter(self._greetings))]

    def version_of(self, route: bytes) -> int:
        """Return the version that the route speaks."""
        return self._get(route).version

    def endpoint_of(self, route: bytes) -> Endpoint:
        """Return where the other side says that it is; "" before its greeting."""
        return self._get(route).endpoint

    def _get(self, route: bytes) -> _Greeting:
        greeting = self._greetings.pop(route, None)
        if greeting is None:
            return _DEFAULT
        self._greetings[route] = greeting
        return greeting
