"""The protocol version of each connection that another daemon opened to this node."""

from __future__ import annotations

# As many as the peer socket accepts connections at a time. 16,384 entries are about 3 MB.
MAX_ROUTES = 16_384
DEFAULT_VERSION = 1  # version 1 did not require the greeting first


class RouteVersions:
    """Keeps the versions of the routes that were used last."""

    def __init__(self) -> None:
        self._versions: dict[bytes, int] = {}

    def set_version(self, route: bytes, version: int) -> None:
        """Record the version that the two sides agreed on."""
        self._versions.pop(route, None)
        self._versions[route] = version
        if len(self._versions) > MAX_ROUTES:
            del self._versions[next(iter(self._versions))]

    def version_of(self, route: bytes) -> int:
        """Return the version that the route speaks."""
        version = self._versions.pop(route, None)
        if version is None:
            return DEFAULT_VERSION
        self._versions[route] = version
        return version
