"""Device memory between a worker and its mover: how it is exported, and how it is mapped again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvxferd.errors import Code, DeviceError
from kvxferd.memory.driver import AddressRange, Driver
from kvxferd.memory.driver_registry import open_driver

if TYPE_CHECKING:
    import torch


class DeviceMemory:
    """A range of GPU memory that the worker's engine owns, for one region of a layout.

    Nothing is allocated or kept alive: the engine keeps the memory as long as it is registered, and
    until `Suspended` or the end of the connection's movers.
    """

    def __init__(self, address: int, size_bytes: int, driver: Driver | None = None) -> None:
        """Raises DeviceError: region-not-exportable where another process cannot map it.

        A resident mover can read such memory.
        """
        if size_bytes <= 0:
            raise DeviceError(f"cannot export {size_bytes} bytes of device memory", Code.REGION_INVALID)
        self.address = address
        self.size_bytes = size_bytes
        self.driver = driver or open_driver()
        self.device = self.driver.device_of(address)
        with self.driver.on(self.device):
            self.allocations = tuple(_allocations_under(self.driver, address, size_bytes))
            # The engine must learn here where the memory is not exportable. Plain and exportable memory
            # never mix in one tensor, so the first allocation stands for all.
            self.driver.release(self.driver.retain(self.allocations[0].base))

    @classmethod
    def of_tensor(cls, tensor: torch.Tensor) -> DeviceMemory:
        """Return the storage under a CUDA tensor. Raises DeviceError as `DeviceMemory` does."""
        storage = tensor.untyped_storage()
        return cls(storage.data_ptr(), storage.nbytes())

    def allocations_under(self, offset: int, size_bytes: int) -> list[AddressRange]:
        """Return the physical allocations under a part of the memory, in order of address."""
        start, end = self.address + offset, self.address + offset + size_bytes
        return [s for s in self.allocations if s.base < end and start < s.base + s.size_bytes]

    def export(self, allocation: AddressRange) -> int:
        """Return a descriptor of one physical allocation, to be closed by the caller."""
        with self.driver.on(self.device):
            handle = self.driver.retain(allocation.base)
            try:
                return self.driver.export(handle)
            finally:
                self.driver.release(handle)


@dataclass(frozen=True, slots=True)
class ResidentMemory:
    """Memory that only this process can reach, so that its region needs a resident mover."""

    address: int
    size_bytes: int
    device: str = ""  # UUID of the GPU; "": host memory
    # What must not be freed while a mover may use the memory: tensors' storages.
    owners: tuple[object, ...] = field(default=(), repr=False, compare=False)


def _allocations_under(driver: Driver, address: int, size_bytes: int) -> Iterable[AddressRange]:
    """Yield the physical allocations under a range, in order of address."""
    end, position = address + size_bytes, address
    while position < end:
        allocation = driver.allocation_range(position)
        if not allocation.base <= position < allocation.base + allocation.size_bytes:
            raise DeviceError(f"cannot export memory at {position:#x}: the driver places it at {allocation}")
        yield allocation
        position = allocation.base + allocation.size_bytes


class MappedAllocation(NamedTuple):
    """One physical allocation, where it is mapped in a mover. Each can be registered by itself."""

    address: int
    size_bytes: int


class DeviceMapping:
    """Imported allocations of one device, mapped one after the other. Its maker calls `unmap`."""

    def __init__(self, driver: Driver, uuid: str, address: int, sizes: Sequence[int]) -> None:
        self._driver = driver
        self._address = address
        self._reserved_bytes = sum(sizes)
        self._mapped: list[MappedAllocation] = []
        self.uuid = uuid

    @classmethod
    def map(cls, driver: Driver, uuid: str, exported: Sequence[tuple[int, int]]) -> DeviceMapping:
        """Map (descriptor, size) pairs, all or none; descriptors stay the caller's.

        Raises DeviceError where a descriptor is no such memory, or no addresses are left.
        """
        sizes = [size for _, size in exported]
        with driver.on(uuid):
            mapping = cls(driver, uuid, driver.reserve(sum(sizes)), sizes)
            try:
                for fd, size in exported:
                    mapping._map_next(fd, size)
                driver.set_access(uuid, mapping._address, sum(sizes))
            except BaseException:
                mapping.unmap()
                raise
        return mapping

    def _map_next(self, fd: int, size_bytes: int) -> None:
        last = self._mapped[-1] if self._mapped else MappedAllocation(self._address, 0)
        address = last.address + last.size_bytes
        handle = self._driver.import_fd(self.uuid, fd, size_bytes)
        try:
            self._driver.map(address, size_bytes, handle)
        finally:
            self._driver.release(handle)  # mapped memory lives until it is unmapped
        self._mapped.append(MappedAllocation(address, size_bytes))

    @property
    def allocations(self) -> tuple[MappedAllocation, ...]:
        """The allocations, in the order of the descriptors."""
        return tuple(self._mapped)

    def unmap(self) -> None:
        """Unmap the memory and free its addresses. Idempotent."""
        with self._driver.on(self.uuid):
            while self._mapped:
                allocation = self._mapped.pop()
                self._driver.unmap(allocation.address, allocation.size_bytes)
            if self._reserved_bytes:
                reserved, self._reserved_bytes = self._reserved_bytes, 0
                self._driver.unreserve(self._address, reserved)
