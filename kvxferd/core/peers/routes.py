"""Where each daemon that connected to this node says it is, by the route of its connection."""

from __future__ import annotations

from kvxferd.ids import Endpoint

# As many as the peer socket accepts connections at a time. 16,384 entries are about 6 MB.
MAX_ROUTES = 16_384


class PeerRoutes:
    """Keeps the endpoints of the routes that were greeted last."""

    def __init__(self) -> None:
        self._endpoints: dict[bytes, Endpoint | None] = {}  # None: its hello was refused

    def set_endpoint(self, route: bytes, endpoint: Endpoint | None) -> None:
        """Record where the other side says it is; "": it names no endpoint that it could have.

        None: its hello was refused, and so is what it sends behind it.
        """
        self._endpoints.pop(route, None)
        self._endpoints[route] = endpoint
        if len(self._endpoints) > MAX_ROUTES:
            del self._endpoints[next(iter(self._endpoints))]

    def endpoint_of(self, route: bytes) -> Endpoint:
        """Return where the other side says it is; "" before its hello."""
        return self._endpoints.get(route) or Endpoint("")

    def is_refused(self, route: bytes) -> bool:
        """Whether the other side's hello was refused."""
        return self._endpoints.get(route, Endpoint("")) is None
