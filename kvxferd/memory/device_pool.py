"""Device memory that can be exported, for engines whose own allocator's cannot be.

pool = DevicePool(uuid)
with torch.cuda.use_mem_pool(pool.torch_pool()):
    cache = torch.empty(...)        # registered with DeviceMemory.of_tensor(cache)
"""

from __future__ import annotations

import ctypes
import logging
import threading
from dataclasses import dataclass
from typing import Any

from kvxferd.errors import DeviceError
from kvxferd.memory.driver import Driver, open_driver

_LOG = logging.getLogger(__name__)

# void *allocate(ssize_t size, int device, void *stream); void free(void *, ssize_t, int, void *)
_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class PoolBlock:
    """One allocation: one physical handle, mapped here."""

    address: int
    size_bytes: int  # as asked for, rounded up to the device's granularity


class DevicePool:
    """Allocates from one device, a physical handle each, so that a tensor is one descriptor. Thread-safe."""

    def __init__(self, uuid: str, driver: Driver | None = None) -> None:
        """Raises DeviceError where there is no such device."""
        self._driver = driver or open_driver()
        self._uuid = uuid
        with self._driver.on(uuid):
            self._granularity = self._driver.granularity(uuid)
        self._blocks: dict[int, PoolBlock] = {}
        self._lock = threading.Lock()
        # torch keeps the addresses of these for as long as anything allocated by them lives.
        self._callbacks = (_ALLOCATE(self._allocate_for_torch), _FREE(self._free_for_torch))
        self._torch_pool: Any = None

    def allocate(self, size_bytes: int) -> PoolBlock:
        """Return memory of at least that size. Raises DeviceError."""
        size = -(-size_bytes // self._granularity) * self._granularity
        driver = self._driver
        with driver.on(self._uuid), self._lock:
            handle = driver.create(self._uuid, size)
            try:
                address = self._map(handle, size)
            finally:
                driver.release(handle)  # what is mapped lives until it is unmapped
            block = PoolBlock(address, size)
            self._blocks[address] = block
        return block

    def _map(self, handle: int, size: int) -> int:
        address = self._driver.reserve(size)
        try:
            self._driver.map(address, size, handle)
            try:
                self._driver.allow(self._uuid, address, size)
            except BaseException:
                self._driver.unmap(address, size)
                raise
        except BaseException:
            self._driver.unreserve(address, size)
            raise
        return address

    def free(self, address: int) -> None:
        """Give memory back that `allocate` returned. Raises KeyError for any other address."""
        with self._driver.on(self._uuid), self._lock:
            block = self._blocks.pop(address)
            self._driver.unmap(block.address, block.size_bytes)
            self._driver.unreserve(block.address, block.size_bytes)

    @property
    def num_bytes(self) -> int:
        """What is allocated now."""
        with self._lock:
            return sum(block.size_bytes for block in self._blocks.values())

    def close(self) -> None:
        """Free everything."""
        for address in list(self._blocks):
            self.free(address)

    # --- torch

    def torch_pool(self) -> Any:
        """Return a `torch.cuda.MemPool` that allocates here; the pool must outlive its tensors."""
        if self._torch_pool is None:
            import torch

            # The public way in takes the name of a shared library; what it does with it is this.
            allocate, free = (ctypes.cast(function, ctypes.c_void_p).value for function in self._callbacks)
            assert allocate is not None and free is not None
            allocator = torch._C._cuda_customAllocator(allocate, free)
            self._torch_pool = torch.cuda.MemPool(allocator)
        return self._torch_pool

    def _allocate_for_torch(self, size: int, device: int, stream: int | None) -> int | None:
        try:
            return self.allocate(size).address
        except DeviceError as error:
            _LOG.error("%s", error.message)
            return None  # torch says that it is out of memory

    def _free_for_torch(self, address: int, size: int, device: int, stream: int | None) -> None:
        try:
            self.free(address)
        except (DeviceError, KeyError) as error:
            _LOG.error("cannot free device memory at %#x: %s", address, error)
