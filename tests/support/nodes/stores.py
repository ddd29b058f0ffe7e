"""A rank's cache in the kinds of memory that engines have. See also `tensor_allocators`."""

from __future__ import annotations

import mmap

import numpy as np

from kvxferd.memory.device import DeviceMemory, ResidentMemory
from kvxferd.memory.driver_registry import open_driver
from kvxferd.tooling import engine_process
from tests.support.devices import Segment

OFFSET = 4096 + 256  # of a cache in its first allocation: torch aligns to 512 bytes at most


class HostStore(engine_process.HostStore):
    """A cache in a sealed memfd that is given back before its process ends."""

    def free(self) -> None:
        del self.bytes
        self.memory.close()


class DeviceStore:
    """A rank's cache on a GPU, in a segment of several allocations; `bytes` is a copy of it."""

    def __init__(self, size_bytes: int, device: int = 0, num_pieces: int = 3, driver: str = "") -> None:
        self.driver = open_driver(driver)
        self.device = self.driver.devices()[device].uuid
        self.size_bytes = size_bytes
        self.num_pieces = num_pieces
        self.bytes = np.zeros(size_bytes, dtype=np.uint8)
        self.allocate()

    def allocate(self) -> None:
        """Have memory; again after `free`, where a new tensor would be."""
        unit = self.driver.granularity(self.device)
        # The cache starts and ends inside an allocation, and the pieces are of two sizes.
        units = -(-(self.size_bytes + OFFSET) // unit)
        piece = -(-units // self.num_pieces)
        sizes = [min(piece, units - start) * unit for start in range(0, units, piece)]
        self.segment = Segment(self.driver, self.device, sizes)
        self.memory = DeviceMemory(self.segment.address + OFFSET, self.size_bytes, self.driver)

    def free(self) -> None:
        self.segment.close()

    def load(self) -> None:
        self.bytes[:] = np.frombuffer(self.segment.read(self.size_bytes, OFFSET), dtype=np.uint8)

    def save(self) -> None:
        self.segment.write(self.bytes.tobytes(), OFFSET)


class OwnStore:
    """A rank's cache in memory that no other process can map; `bytes` is the cache itself."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.allocate()

    def allocate(self) -> None:
        """Have memory; again after `free`, with nothing in it."""
        self.mapping = mmap.mmap(-1, self.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = np.frombuffer(self.mapping, dtype=np.uint8)
        self.memory = ResidentMemory(self.bytes.ctypes.data, self.size_bytes)

    def free(self) -> None:
        """Unmap: whoever touches the memory now kills this process."""
        del self.bytes
        self.mapping.close()

    def load(self) -> None:
        """The cache is in `bytes`."""

    def save(self) -> None:
        """`bytes` is in the cache."""
