"""The peer socket: requests to other daemons, and replies by route.

Promises:

* Requests over one connection arrive in order, all with one route; a reply goes back to who asked.
* After a disconnect the next request has another route, and a reply to the old one reaches nobody.
* A request to a daemon that is away waits for the next one at that address, or for a disconnect.
* The sender is not told of any of this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvxferd.wire.common import Message

OnRequest = Callable[[bytes, Message], None]
OnReply = Callable[[str, Message], None]


class PeerNetwork:
    """All peer sockets, by address."""

    def __init__(self) -> None:
        self.bound: dict[str, PeerEnd] = {}
        self._num_routes = 0
        self.routes: dict[bytes, tuple[PeerEnd, str]] = {}  # who asked, and at which address

    def new_route(self, asking: PeerEnd, address: str) -> bytes:
        """Return the route of a new connection."""
        self._num_routes += 1
        route = b"\0" + self._num_routes.to_bytes(4, "big")
        self.routes[route] = asking, address
        return route


class PeerEnd:
    """One daemon's peer socket, bound from the start."""

    def __init__(self, network: PeerNetwork, address: str, on_request: OnRequest, on_reply: OnReply) -> None:
        self.address = address
        self._network = network
        self._on_request, self._on_reply = on_request, on_reply
        self._own_routes: dict[str, bytes] = {}  # by the address of the other
        self._waiting: dict[str, deque[Message]] = {}
        network.bound[address] = self
        for asking in {end for end, _ in network.routes.values()}:
            asking.flush(address)

    def send(self, address: str, message: Message) -> None:
        """Send a request; open the connection if there is none."""
        if address not in self._own_routes:
            self._own_routes[address] = self._network.new_route(self, address)
        self._waiting.setdefault(address, deque()).append(message)
        self.flush(address)

    def flush(self, address: str) -> None:
        """Deliver what waits for a daemon, if it is there."""
        target = self._network.bound.get(address)
        waiting = self._waiting.get(address)
        while target is not None and waiting:
            target._on_request(self._own_routes[address], waiting.popleft())

    def reply(self, route: bytes, message: Message) -> None:
        """Send to who asked by that route, if it is still there."""
        found = self._network.routes.get(route)
        if found is not None:
            asking, address = found
            asking._on_reply(address, message)

    def disconnect(self, address: str) -> None:
        """Close the connection; what waits is dropped."""
        self._waiting.pop(address, None)
        if (route := self._own_routes.pop(address, None)) is not None:
            del self._network.routes[route]

    def stop(self) -> None:
        """The daemon is gone: both its own connections and those to it have ended."""
        del self._network.bound[self.address]
        for address in list(self._own_routes):
            self.disconnect(address)
        for route, (asking, address) in list(self._network.routes.items()):
            if address == self.address:
                del self._network.routes[route]
                asking._own_routes[address] = self._network.new_route(asking, address)
