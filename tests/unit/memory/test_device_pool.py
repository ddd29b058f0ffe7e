"""What torch does with a pool's two C functions, by a stand-in for torch's allocator.

Torch itself calls them in tests/integration/gpu. Here it is shown that they may be called from any
thread, for whatever device, and after everything of the pool is gone.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kvxferd.errors import Code, DeviceError
from kvxferd.memory.device import DeviceMemory
from kvxferd.memory.device_pool import DevicePool
from tests.support.devices import read, used_bytes, write
from tests.support.fake_driver import FAKE_DEVICES, GRANULARITY, FakeDriver

ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)

Allocate = Callable[[int, int, None], int | None]
Free = Callable[[int, int, int, None], None]


class Allocator:
    """As torch's: it knows two addresses."""

    def __init__(self, allocate: int, free: int) -> None:
        self.allocate, self.free = ALLOCATE(allocate), FREE(free)


class MemPool:
    """As torch's: caches what is freed, and gives it back when it is destroyed."""

    def __init__(self, allocator: Allocator) -> None:
        # Older torch has a bare pointer, and crashes where this finds None.
        self._allocator = weakref.ref(allocator)
        self.ordinal = Current.ordinal
        self.cached: list[int] = []

    @property
    def functions(self) -> tuple[Allocate, Free]:
        allocator = self._allocator()
        assert allocator is not None
        return allocator.allocate, allocator.free

    def allocate(self, size: int, ordinal: int) -> int | None:
        return self.functions[0](size, ordinal, None)

    def __del__(self) -> None:
        for address in self.cached:
            self.functions[1](address, 0, self.ordinal, None)


class Current:
    """As `torch.cuda.device`."""

    ordinal = 0

    def __init__(self, ordinal: int) -> None:
        self._ordinal, self._before = ordinal, Current.ordinal

    def __enter__(self) -> None:
        Current.ordinal = self._ordinal

    def __exit__(self, *_: object) -> None:
        Current.ordinal = self._before


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    import torch

    monkeypatch.setattr(torch._C, "_cuda_customAllocator", Allocator, raising=False)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(MemPool=MemPool, device=Current))
    return FakeDriver()


def test_torch_allocates_what_can_be_exported_on_the_pools_device(driver: FakeDriver) -> None:
    second = FAKE_DEVICES[1]
    pool = DevicePool(second.uuid, driver)
    torchs = pool.torch_pool()
    assert pool.torch_pool() is torchs
    assert torchs.ordinal == second.ordinal
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(torchs.allocate(GRANULARITY + 1, second.ordinal)))
    thread.start()
    thread.join()
    memory = DeviceMemory(got[0], GRANULARITY + 1, driver)
    assert memory.device == second.uuid
    assert memory.allocations == ((got[0], 2 * GRANULARITY),)
    assert pool.num_bytes == 2 * GRANULARITY
    torchs.functions[1](got[0], GRANULARITY + 1, second.ordinal, None)
    assert pool.num_bytes == 0


def test_torch_gets_nothing_for_another_device_or_after_a_failure(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Out of memory, to torch, whatever it was."""
    pool = DevicePool(FAKE_DEVICES[1].uuid, driver)
    torchs = pool.torch_pool()
    assert torchs.allocate(GRANULARITY, FAKE_DEVICES[0].ordinal) is None
    assert "device that is current" in caplog.text
    for error in (DeviceError("no more"), RuntimeError("whatever it is")):

        def fail(*_: object, error: Exception = error) -> int:
            raise error

        monkeypatch.setattr(driver, "create", fail)
        assert torchs.allocate(GRANULARITY, FAKE_DEVICES[1].ordinal) is None
        assert str(error) in caplog.text
    assert pool.num_bytes == 0


def test_closing_gives_torchs_cache_back_and_leaves_its_tensors(driver: FakeDriver) -> None:
    pool = DevicePool(FAKE_DEVICES[0].uuid, driver)
    own = pool.allocate(GRANULARITY)
    torchs = pool.torch_pool()
    free = torchs.functions[1]
    tensor, cached = torchs.allocate(GRANULARITY, 0), torchs.allocate(GRANULARITY, 0)
    assert tensor is not None
    assert cached is not None
    torchs.cached.append(cached)
    write(driver, tensor, b"kept")
    del torchs
    pool.close()
    assert pool.num_bytes == GRANULARITY
    assert read(driver, tensor, 4) == b"kept"
    with pytest.raises(DeviceError):
        driver.allocation_range(own.address)
    free(tensor, GRANULARITY, 0, None)
    assert pool.num_bytes == 0


def test_torch_may_free_when_the_pool_is_long_gone(driver: FakeDriver) -> None:
    pool = DevicePool(FAKE_DEVICES[0].uuid, driver)
    torchs = pool.torch_pool()
    address = torchs.allocate(GRANULARITY, 0)
    torchs.cached.append(address)
    del pool
    gc.collect()
    assert driver.allocation_range(address).size_bytes == GRANULARITY
    del torchs  # calls back
    with pytest.raises(DeviceError) as raised:
        driver.allocation_range(address)
    assert raised.value.code is Code.DEVICE_ERROR


def test_memory_goes_and_comes_back_at_the_same_addresses(driver: FakeDriver) -> None:
    """What torch and the pool itself have allocated, as sleep needs it."""
    uuid = FAKE_DEVICES[0].uuid
    pool = DevicePool(uuid, driver)
    torchs = pool.torch_pool()
    own, tensor = pool.allocate(GRANULARITY).address, torchs.allocate(2 * GRANULARITY, 0)
    assert tensor is not None
    write(driver, tensor, b"lost")
    before = used_bytes(driver, uuid)
    for _ in range(2):
        pool.release_memory()
    assert pool.num_bytes == 0
    assert used_bytes(driver, uuid) == before - 3 * GRANULARITY
    for address in (own, tensor):
        with pytest.raises(DeviceError):
            driver.allocation_range(address)
    for _ in range(2):
        pool.restore_memory()
    assert pool.num_bytes == 3 * GRANULARITY
    assert used_bytes(driver, uuid) == before
    assert read(driver, tensor, 4) == bytes(4), "new memory"
    assert DeviceMemory(tensor, 2 * GRANULARITY, driver).allocations == ((tensor, 2 * GRANULARITY),)
    pool.release_memory()
    torchs.functions[1](tensor, 2 * GRANULARITY, 0, None)  # torch may free while the memory is away
    pool.restore_memory()
    assert pool.num_bytes == GRANULARITY
    pool.close()
    assert pool.num_bytes == 0


def test_memory_that_does_not_come_back_whole_is_asked_for_again(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = DevicePool(FAKE_DEVICES[0].uuid, driver)
    blocks = [pool.allocate(GRANULARITY) for _ in range(3)]
    pool.release_memory()
    create, left = driver.create, [1]

    def create_one(uuid: str, size_bytes: int) -> int:
        if not left:
            raise DeviceError("out of memory")
        left.pop()
        return create(uuid, size_bytes)

    with monkeypatch.context() as full:
        full.setattr(driver, "create", create_one)
        with pytest.raises(DeviceError, match="out of memory"):
            pool.restore_memory()
    assert pool.num_bytes == GRANULARITY
    pool.restore_memory()
    assert pool.num_bytes == 3 * GRANULARITY
    assert all(driver.allocation_range(block.address).size_bytes == GRANULARITY for block in blocks)
    pool.close()
