"""Device memory for tests, over any driver: what engines' allocators make, and its bytes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from types import TracebackType

import pytest

from kvxferd.errors import DeviceError
from kvxferd.memory.cuda import CudaDriver
from kvxferd.memory.driver import Driver
from kvxferd.memory.driver_registry import open_driver
from tests.support import fake_driver
from tests.support.fake_driver import FAKE, FakeDriver
from tests.support.nodes.processes import descendants

# Every test that takes a driver runs over both; without a GPU the second skips and says why.
DRIVERS = [pytest.param(FAKE, id="fake"), pytest.param("cuda", marks=pytest.mark.gpu)]


def driver_or_skip(name: str) -> Driver:
    """Return a driver; skip the test with the driver's own reason where there is none."""
    if name == FAKE:
        return FakeDriver()
    try:
        return open_driver(name)
    except DeviceError as error:
        pytest.skip(error.message)


def used_bytes(driver: Driver, uuid: str) -> int:
    """Return how much of a device's memory is in use: by this process and its children, of a fake device.

    Every process of the machine has the same fake devices, those of other tests too.
    """
    if not isinstance(driver, CudaDriver):
        return fake_driver.used_bytes(uuid, (os.getpid(), *descendants(os.getpid())))
    with driver.on(uuid):
        free, total = driver._call("cuMemGetInfo")
    return int(total) - int(free)


def free_plain(driver: Driver, address: int) -> None:
    """Undo `allocate_plain`."""
    if isinstance(driver, FakeDriver):
        driver.free_plain(address)
    elif isinstance(driver, CudaDriver):
        with driver.on(driver.device_of(address)):
            driver._call("cuMemFree", address)


class HostBuffer:
    """Pinned memory that devices copy from and to."""

    def __init__(self, driver: Driver, size_bytes: int) -> None:
        self._driver = driver
        self.size_bytes = size_bytes
        self.address = driver.allocate_host(size_bytes)

    def write(self, content: bytes) -> None:
        ctypes.memmove(self.address, content, len(content))

    def read(self, size_bytes: int) -> bytes:
        return ctypes.string_at(self.address, size_bytes)

    def __enter__(self) -> HostBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._driver.free_host(self.address)


def _copy(driver: Driver, to: int, source: int, size_bytes: int) -> None:
    stream = driver.open_stream()
    driver.copy([to], [source], [size_bytes], stream)
    driver.synchronize(stream)
    driver.close_stream(stream)


def write(driver: Driver, address: int, content: bytes) -> None:
    """Put bytes into device memory."""
    with driver.on(driver.device_of(address)), HostBuffer(driver, len(content)) as buffer:
        buffer.write(content)
        _copy(driver, address, buffer.address, len(content))


def read(driver: Driver, address: int, size_bytes: int) -> bytes:
    """Return bytes of device memory."""
    with driver.on(driver.device_of(address)), HostBuffer(driver, size_bytes) as buffer:
        _copy(driver, buffer.address, address, size_bytes)
        return buffer.read(size_bytes)


class Segment:
    """Several physical allocations side by side, as torch's expandable segments are."""

    def __init__(self, driver: Driver, uuid: str, sizes: Sequence[int]) -> None:
        """`sizes` in bytes, multiples of the granularity."""
        self.driver, self.uuid, self.sizes = driver, uuid, tuple(sizes)
        self.size_bytes = sum(sizes)
        self._grown: list[tuple[int, int]] = []
        with driver.on(uuid):
            self.address = driver.reserve(self.size_bytes)
            for size in sizes:
                self._grow(size)
            driver.set_access(uuid, self.address, self.size_bytes)

    def _grow(self, size: int) -> None:
        address = self.address + sum(grown for _, grown in self._grown)
        handle = self.driver.create(self.uuid, size)
        self.driver.map(address, size, handle)
        self.driver.release(handle)
        self._grown.append((address, size))

    def write(self, content: bytes, offset: int = 0) -> None:
        write(self.driver, self.address + offset, content)

    def read(self, size_bytes: int, offset: int = 0) -> bytes:
        return read(self.driver, self.address + offset, size_bytes)

    def close(self) -> None:
        with self.driver.on(self.uuid):
            for address, size in self._grown:
                self.driver.unmap(address, size)
            if self._grown:
                self._grown = []
                self.driver.unreserve(self.address, self.size_bytes)

    def __enter__(self) -> Segment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
