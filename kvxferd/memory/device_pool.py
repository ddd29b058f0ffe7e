"""Device memory that can be exported, for engines whose own allocator's memory cannot.

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
from kvxferd.memory.driver import Driver
from kvxferd.memory.driver_registry import open_driver

_LOG = logging.getLogger(__name__)

# void *allocate(ssize_t size, int device, void *stream); void free(void *, ssize_t, int, void *)
_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class PoolBlock:
    """One allocation: one physical handle, mapped here."""

    address: int
    size_bytes: int  # the requested size, rounded up to the device's granularity


class _Allocations:
    """The blocks that are allocated from one device. Thread-safe."""

    def __init__(self, uuid: str, driver: Driver) -> None:
        self._driver = driver
        self._uuid = uuid
        with driver.on(uuid):
            self._granularity = driver.granularity(uuid)
        self._blocks: dict[int, PoolBlock] = {}
        self._released: set[int] = set()  # addresses of blocks whose memory is given back for a while
        self._lock = threading.Lock()

    def allocate(self, size_bytes: int) -> PoolBlock:
        size = -(-size_bytes // self._granularity) * self._granularity
        driver = self._driver
        with driver.on(self._uuid), self._lock:
            address = driver.reserve(size)
            try:
                self._map_new(address, size)
            except BaseException:
                driver.unreserve(address, size)
                raise
            block = PoolBlock(address, size)
            self._blocks[address] = block
        return block

    def _map_new(self, address: int, size: int) -> None:
        """Put new memory under addresses that are reserved."""
        driver = self._driver
        handle = driver.create(self._uuid, size)
        try:
            driver.map(address, size, handle)
        finally:
            driver.release(handle)  # mapped memory lives until it is unmapped
        try:
            driver.set_access(self._uuid, address, size)
        except BaseException:
            driver.unmap(address, size)
            raise

    def free(self, address: int) -> None:
        with self._driver.on(self._uuid), self._lock:
            block = self._blocks.pop(address)
            if address not in self._released:
                self._driver.unmap(block.address, block.size_bytes)
            self._released.discard(address)
            self._driver.unreserve(block.address, block.size_bytes)

    def free_all(self) -> None:
        for address in list(self._blocks):
            self.free(address)

    def release_memory(self) -> None:
        with self._driver.on(self._uuid), self._lock:
            for block in self._blocks.values():
                if block.address not in self._released:
                    self._driver.unmap(block.address, block.size_bytes)
                    self._released.add(block.address)

    def restore_memory(self) -> None:
        with self._driver.on(self._uuid), self._lock:
            for address in sorted(self._released):
                self._map_new(address, self._blocks[address].size_bytes)
                self._released.discard(address)

    @property
    def num_bytes(self) -> int:
        with self._lock:
            held = [b for b in self._blocks.values() if b.address not in self._released]
            return sum(block.size_bytes for block in held)


class _TorchCallbacks:
    """The two C functions that torch calls. They outlive the pool, as tensors and torch's cache may."""

    def __init__(self, allocations: _Allocations, ordinal: int) -> None:
        self.allocations = allocations
        self.ordinal = ordinal
        self._functions = (_ALLOCATE(self._allocate), _FREE(self._free))
        self.allocator: Any = (
            None  # torch's object, kept: a MemPool of older versions keeps its address alone
        )

    def addresses(self) -> tuple[int, int]:
        """Return the functions' addresses."""
        allocate, free = (ctypes.cast(function, ctypes.c_void_p).value for function in self._functions)
        assert allocate is not None and free is not None
        return allocate, free

    def _allocate(self, size: int, device: int, stream: int | None) -> int | None:
        # An exception here would be printed, and torch would get an invalid address.
        try:
            if device != self.ordinal:
                raise DeviceError(
                    f"cannot allocate on device {device} from a pool of device {self.ordinal}: "
                    "use_mem_pool takes the device that is current"
                )
            return self.allocations.allocate(size).address
        except Exception as error:
            _LOG.error("device memory not allocated: reason=%s", error)
            return None  # torch raises that it is out of memory

    def _free(self, address: int, size: int, device: int, stream: int | None) -> None:
        try:
            self.allocations.free(address)
        except (DeviceError, KeyError) as error:
            _LOG.error("device memory not freed: address=%#x reason=%s", address, error)


# Never freed: torch may call them until the process ends, and they are a few hundred bytes each.
_KEPT_CALLBACKS: list[_TorchCallbacks] = []


class DevicePool:
    """Allocates from one device, one physical handle a block, so that a tensor is one descriptor.

    Thread-safe.
    """

    def __init__(self, uuid: str, driver: Driver | None = None) -> None:
        """Raises DeviceError where the device does not exist."""
        self._driver = driver or open_driver()
        self._uuid = uuid
        self._allocations = _Allocations(uuid, self._driver)
        self._torch_callbacks: _TorchCallbacks | None = None
        self._torch_pool: Any = None

    def allocate(self, size_bytes: int) -> PoolBlock:
        """Return memory of at least that size. Raises DeviceError."""
        return self._allocations.allocate(size_bytes)

    def free(self, address: int) -> None:
        """Free memory that `allocate` returned. Raises KeyError for any other address."""
        self._allocations.free(address)

    @property
    def num_bytes(self) -> int:
        """How many bytes of memory it has now, those for torch included."""
        return sum(allocations.num_bytes for allocations in self._all)

    @property
    def _all(self) -> list[_Allocations]:
        return [self._allocations] + ([self._torch_callbacks.allocations] if self._torch_callbacks else [])

    def release_memory(self) -> None:
        """Give all memory back to the device, and keep the addresses. Idempotent.

        Nothing may touch the blocks until `restore_memory`, and no other process may map them any more;
        their content is lost. Work on the device that uses them is over. Raises DeviceError.
        """
        for allocations in self._all:
            allocations.release_memory()

    def restore_memory(self) -> None:
        """Put new memory under the addresses of all blocks whose memory was given back. Idempotent.

        Raises DeviceError where the device has no room; another call goes on from there.
        """
        for allocations in self._all:
            allocations.restore_memory()

    def close(self) -> None:
        """Free everything that `allocate` returned. Torch frees its blocks, each with its last tensor."""
        self._torch_pool = None
        self._allocations.free_all()

    # --- torch

    def torch_pool(self) -> Any:
        """Return a `torch.cuda.MemPool` that allocates here, on this pool's device.

        Torch frees memory once no tensor is in it and the pool is closed (or collected);
        `torch.cuda.empty_cache` alone does not free it. Torch calls into Python with its allocator's lock
        held: while tensors are allocated here, no other thread may allocate or free any on the device, or
        both threads deadlock.
        """
        if self._torch_pool is None:
            import torch

            callbacks = self._open_torch_callbacks()
            with torch.cuda.device(callbacks.ordinal):  # a MemPool belongs to the current device
                if callbacks.allocator is None:
                    # The public function takes the path of a shared library, and then calls this.
                    callbacks.allocator = torch._C._cuda_customAllocator(*callbacks.addresses())
                self._torch_pool = torch.cuda.MemPool(callbacks.allocator)
        return self._torch_pool

    def _open_torch_callbacks(self) -> _TorchCallbacks:
        if self._torch_callbacks is None:
            ordinal = self._driver.device(self._uuid).ordinal
            self._torch_callbacks = _TorchCallbacks(_Allocations(self._uuid, self._driver), ordinal)
            _KEPT_CALLBACKS.append(self._torch_callbacks)
        return self._torch_callbacks
