"""A core behind a real peer socket, on an event loop of its own thread: a daemon without movers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvxferd.control.curve_keys import CurveKeyPair
from kvxferd.control.peer_socket import PeerSocket
from kvxferd.core.allowlist import PeerAllowlist
from kvxferd.core.effects import ReplyToPeer
from kvxferd.core.events import Event
from kvxferd.core.node import Node
from kvxferd.core.settings import Settings
from kvxferd.ids import BootId, Endpoint

START_S = 20.0


@dataclass(frozen=True)
class ServedPeer:
    """Where it is, and its event loop, which a test may block."""

    address: Endpoint
    loop: asyncio.AbstractEventLoop

    @contextmanager
    def hung(self) -> Iterator[None]:
        """Its event loop stands still meanwhile; libzmq's thread runs on."""
        begun, release = threading.Event(), threading.Event()

        def hang() -> None:
            begun.set()
            release.wait()

        self.loop.call_soon_threadsafe(hang)
        begun.wait()
        try:
            yield
        finally:
            release.set()


@contextmanager
def served_peer(
    allowlist: PeerAllowlist | None = None, key: CurveKeyPair | None = None
) -> Iterator[ServedPeer]:
    """Serve a node on a free port of loopback."""
    loop = asyncio.new_event_loop()
    node = Node(
        boot=BootId("there"), endpoint=Endpoint("tcp://127.0.0.1:1"), settings=Settings(software="1.2.3"),
        new_token=lambda: "0" * 32,
    )  # fmt: skip
    found: list[PeerSocket] = []
    started = threading.Event()

    def on_event(event: Event) -> None:
        for effect in node.feed(event, time.monotonic()):
            if isinstance(effect, ReplyToPeer):
                found[0].reply(effect.route, effect.message)

    stopping = asyncio.Event()

    async def serve() -> None:
        found.append(PeerSocket("tcp://127.0.0.1:0", on_event, lambda: node, allowlist, key))
        found[0].start()
        started.set()
        await stopping.wait()
        found[0].stop()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(serve())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        assert started.wait(START_S)
        yield ServedPeer(Endpoint(found[0].bound_endpoint), loop)
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join(START_S)
        assert not thread.is_alive()
