"""A rank's cache as a torch tensor, from each of the allocators that engines use."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kvxferd.errors import Code, DeviceError
from kvxferd.memory.device import DeviceMemory, ResidentMemory
from kvxferd.memory.device_pool import DevicePool
from kvxferd.memory.driver import DRIVER_VARIABLE
from kvxferd.memory.driver_registry import open_driver
from kvxferd.resident import memory_of
from tests.support.devices import Segment, free_plain

if TYPE_CHECKING:
    import torch

# default: cudaMalloc. expandable: torch's expandable segments. pool: kvxferd's own, for torch.cuda.MemPool.
ALLOCATORS = ("default", "expandable", "pool")


class TensorStore:
    """See `stores.DeviceStore`. Over the fake driver: over what the allocator would have made."""

    def __init__(self, size_bytes: int, tensor: str, driver: str, device: int = 0) -> None:
        if tensor == "expandable" and driver == "cuda":
            assert "torch" not in sys.modules, "torch reads this when its allocator is first used"
            for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
                os.environ[name] = "expandable_segments:True"
        os.environ[DRIVER_VARIABLE] = driver
        self.driver = open_driver()
        self.size_bytes = size_bytes
        self.device = self.driver.devices()[device].uuid
        self.ordinal = self.driver.device(self.device).ordinal
        self.bytes = np.zeros(size_bytes, dtype=np.uint8)
        self._make = _on_gpu(tensor) if driver == "cuda" else _faked(tensor)
        self.allocate()

    def allocate(self) -> None:
        """Have a tensor; and the memory of it that some mover can read."""
        self.tensor, self.give_back = self._make(self)
        self.memory: DeviceMemory | ResidentMemory
        try:
            self.memory = DeviceMemory.of_tensor(self.tensor)
        except DeviceError as error:
            if error.code is not Code.REGION_NOT_EXPORTABLE:
                raise
            storage = self.tensor.untyped_storage()
            if self.tensor.device.type == "cpu":
                self.memory = ResidentMemory(storage.data_ptr(), storage.nbytes(), self.device)
            else:
                self.memory = memory_of(self.tensor)

    def free(self) -> None:
        del self.tensor
        self.give_back()

    def load(self) -> None:
        self.bytes[:] = self.tensor.cpu().numpy()

    def save(self) -> None:
        import torch

        self.tensor.copy_(torch.from_numpy(self.bytes))
        if self.tensor.device.type == "cuda":
            torch.cuda.synchronize(self.tensor.device)


Make = Callable[[TensorStore], "tuple[torch.Tensor, Callable[[], None]]"]


def _on_gpu(kind: str) -> Make:
    def make(store: TensorStore) -> tuple[torch.Tensor, Callable[[], None]]:
        import torch

        where = {"dtype": torch.uint8, "device": f"cuda:{store.ordinal}"}
        if kind != "pool":
            return torch.empty(store.size_bytes, **where), torch.cuda.empty_cache
        pool = DevicePool(store.device, store.driver)
        with torch.cuda.use_mem_pool(pool.torch_pool(), device=store.ordinal):
            tensor = torch.empty(store.size_bytes, **where)
        assert pool.num_bytes >= store.size_bytes, "torch allocated elsewhere"

        def give_back() -> None:
            pool.close()
            assert not pool.num_bytes, "torch keeps it"

        return tensor, give_back

    return make


def _faked(kind: str) -> Make:
    def make(store: TensorStore) -> tuple[torch.Tensor, Callable[[], None]]:
        driver = store.driver
        if kind == "default":
            address = driver.allocate_plain(store.device, store.size_bytes)
            return _tensor_at(address, store.size_bytes), lambda: free_plain(driver, address)
        if kind == "pool":
            pool = DevicePool(store.device, driver)
            return _tensor_at(pool.allocate(store.size_bytes).address, store.size_bytes), pool.close
        unit = driver.granularity(store.device)
        segment = Segment(driver, store.device, [unit] * (-(-store.size_bytes // unit)))
        return _tensor_at(segment.address, store.size_bytes), segment.close

    return make


def _tensor_at(address: int, size_bytes: int) -> torch.Tensor:
    import torch

    return torch.frombuffer((ctypes.c_char * size_bytes).from_address(address), dtype=torch.uint8)
