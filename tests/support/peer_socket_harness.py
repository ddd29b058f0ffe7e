"""A peer socket on loopback without a node behind it, and what it reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kvxferd.control.curve_keys import CurveKeyPair
from kvxferd.control.peer_socket import PeerSocket
from kvxferd.control.resolver import Resolver
from kvxferd.core import events as ev
from kvxferd.core.allowlist import PeerAllowlist
from kvxferd.ids import Endpoint
from kvxferd.layout import EngineSpec
from kvxferd.layout.presets import attention_layout
from kvxferd.wire.common import Binding, RankManifest, RegionAddress
from kvxferd.wire.outlines import JoinRankOutline
from kvxferd.wire.peer import PEER_VERSIONS, JoinRank, PeerHello, PeerRefused

HELLO = PeerHello(request=1, versions=PEER_VERSIONS, boot="b", endpoint=Endpoint("tcp://x:1"))
LIMIT_S = 30.0


class NoChecks:
    """The checks of a node that lets every manifest be decoded."""

    def refusal_of_join(self, route: bytes, message: JoinRankOutline, key: str) -> PeerRefused | None:
        """Return None."""
        return None

    def is_request_open(self, endpoint: Endpoint, request: int) -> bool:
        """Return True."""
        return True


class ListeningPeer:
    """A peer socket, and the events that it has reported."""

    def __init__(
        self,
        address: str = "tcp://127.0.0.1:0",
        *,
        key: CurveKeyPair | None = None,
        allowlist: PeerAllowlist | None = None,
        resolver: Resolver | None = None,
    ) -> None:
        self.key = key
        self.events: list[ev.Event] = []
        # What `next` has not returned: neither how connections come and go, nor what time it is.
        self.received: asyncio.Queue[Any] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._is_stopped = False
        trust = allowlist or PeerAllowlist(own_key=key.public if key else "")
        self.socket = PeerSocket(address, self._on_event, NoChecks, trust, key, resolver=resolver)
        self.socket.start()
        self.address = Endpoint(self.socket.bound_endpoint)
        self.port = int(self.address.rpartition(":")[2])

    def _on_event(self, event: ev.Event) -> None:
        self.events.append(event)
        self._changed.set()
        if not isinstance(event, ev.PeerConnected | ev.PeerDisconnected | ev.Tick):
            self.received.put_nowait(event)

    def of(self, *kinds: type) -> list[Any]:
        """Return the events of these kinds."""
        return [event for event in self.events if isinstance(event, kinds)]

    async def next(self) -> Any:
        """Return the next message, or what else became of one."""
        return await asyncio.wait_for(self.received.get(), LIMIT_S)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until it holds, which an event has to change."""
        async with asyncio.timeout(LIMIT_S):
            while not holds():
                self._changed.clear()
                await self._changed.wait()

    def stop(self) -> None:
        """Close the socket. Idempotent."""
        if not self._is_stopped:
            self._is_stopped = True
            self.socket.stop()


def join_of(name: str = "spread", num_layers: int = 2) -> JoinRank:
    """Return the message that joins the one rank of an engine."""
    spec = EngineSpec(name, "g1", num_layers=num_layers, num_kv_heads=2)
    layout = attention_layout(
        spec=spec, layout="NHD", num_kv_heads=2, head_dim=2, block_tokens=4, num_blocks=8
    )
    regions = tuple(RegionAddress(r.region, 4096, r.size_bytes) for r in layout.regions)
    manifest = RankManifest(spec, layout, Binding("boot/1", b"meta", regions, "first"))
    return JoinRank(request=7, boot="boot", manifest=manifest, secret="s")
