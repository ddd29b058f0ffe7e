"""cudaMalloc's memory, read by another process: a `PlainMemory` in each of two `ChildProcess`es."""

from __future__ import annotations

import random

from kvxferd.ids import AgentName
from kvxferd.memory.driver_registry import open_driver
from kvxferd.mover.transport.base import MemoryKind, MemoryRange, ReadKinds
from kvxferd.mover.transport.nixl import NixlTransport, import_library
from kvxferd.mover.transport.runs import single_run
from tests.support.devices import read, used_bytes, write

SIZE_BYTES = 4 << 20
CONTENT = random.Random(1).randbytes(SIZE_BYTES)


class PlainMemory:
    """An agent and its memory in the first device."""

    def __init__(self, name: str) -> None:
        self._transport = NixlTransport(import_library(), AgentName(name))
        self._driver = open_driver("cuda")
        device = self._driver.devices()[0]
        self._uuid, self._place = device.uuid, MemoryKind(self._driver.mem_type, device.ordinal)
        self._address = self._driver.allocate_plain(device.uuid, SIZE_BYTES)
        self._span = MemoryRange(self._address, SIZE_BYTES, *self._place[:2])
        self._transport.register(self._span)

    def fill(self) -> tuple[bytes, int]:
        """Write the content; return what a reader needs."""
        write(self._driver, self._address, CONTENT)
        return self._transport.metadata([self._span]), self._address

    def progress(self) -> bool:
        """Serve readers, as `ChildProcess` calls it between calls."""
        self._transport.progress()
        return True

    def reads(self, metadata: bytes, remote: int) -> bool:
        """Read all of it; return whether every byte came."""
        self._agent = self._transport.load_remote(metadata)
        runs = single_run(self._address, remote, SIZE_BYTES)
        handle = self._transport.post(self._agent, runs, ReadKinds(self._place, self._place))
        while not self._transport.poll(handle):
            pass
        self._transport.release(handle)
        return read(self._driver, self._address, SIZE_BYTES) == CONTENT

    def drop_source(self) -> int:
        """Drop what was read; return by how many bytes less of the device are in use."""
        used = used_bytes(self._driver, self._uuid)
        self._transport.drop_remote(self._agent)
        self._transport.progress()
        return used - used_bytes(self._driver, self._uuid)
