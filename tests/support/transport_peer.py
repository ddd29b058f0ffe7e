"""Somebody to read from, over any transport: in this process, or in one of its own over NIXL."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kvxferd.ids import AgentName
from kvxferd.memory import Mapping as MappedMemory
from kvxferd.memory import SealedMemory, map_memfd
from kvxferd.mover.transport.base import MemoryRange, Transport
from kvxferd.mover.transport.nixl import NixlTransport, import_library
from kvxferd.tooling.child_process import ChildProcess


class Peer:
    """An agent and its memory."""

    def __init__(self, transport: Transport) -> None:
        self.agent = transport.agent
        self._transport = transport
        self._mappings: dict[int, MappedMemory] = {}

    def allocate(self, size: int, device: int = 0) -> MemoryRange:
        with SealedMemory.create(size) as memory:
            mapping = map_memfd(memory.fd, size)
        self._mappings[mapping.address] = mapping
        span = MemoryRange(mapping.address, size, "DRAM", device)
        self._transport.register(span)
        return span

    def describe(self, *spans: MemoryRange) -> bytes:
        return self._transport.metadata(spans)

    def write(self, span: MemoryRange, offset: int, content: bytes) -> None:
        self._mappings[span.address].view()[offset : offset + len(content)] = content

    def tell(self, metadata: bytes, note: bytes) -> None:
        self._transport.notify(self._transport.load_remote(metadata), note)

    def received(self) -> list[tuple[AgentName, bytes]]:
        return self._transport.receive_notifications()

    def progress(self) -> bool:
        """Serve readers, as `ChildProcess` calls it between calls."""
        self._transport.progress()
        time.sleep(0.0002)
        return True

    def kill(self) -> None:
        self._transport.close()


def nixl_peer(agent: AgentName) -> Peer:
    return Peer(NixlTransport(import_library(), agent))


class ChildPeer:
    """A `Peer` over NIXL in a process of its own."""

    def __init__(self, agent: AgentName, log: Path, environ: Mapping[str, str]) -> None:
        self.agent = agent
        self._process = ChildProcess(partial(nixl_peer, agent), log, environ)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._process.call, getattr(Peer, name))

    def kill(self) -> None:
        self._process.kill()
