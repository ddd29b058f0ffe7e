"""The pool in which vLLM allocates a worker's cache, so that another process can map it.

vLLM asks its connector for a pool before it allocates (`get_mem_pool_context`, 0.32 and 0.33). Without one
it calls cudaMalloc, or its sleep mode's allocator, and neither makes memory that can be exported.

What lies in this pool is not in that allocator's care. So around sleep the pool gives its memory back to
the device by itself, and keeps the addresses, which CUDA graphs have recorded.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from kvxferd.errors import DeviceError, KvxferdError
from kvxferd.integrations.vllm.memory.placement_advice import DOCTOR_HERE, PlacementFailure
from kvxferd.memory.device import DeviceMemory
from kvxferd.memory.device_pool import DevicePool
from kvxferd.memory.driver import Driver
from kvxferd.memory.driver_registry import open_driver

# vLLM refuses the first with any connector, and does not know torch's newer name of it.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class CachePool(DevicePool):
    """A pool on one device, whose memory was exported once to see that it can be."""

    def __init__(self, uuid: str, driver: Driver) -> None:
        """Raises DeviceError where the device's memory cannot be exported."""
        super().__init__(uuid, driver)
        block = self.allocate(1)
        try:
            memory = DeviceMemory(block.address, block.size_bytes, driver)
            os.close(memory.export(memory.allocations[0]))
        finally:
            self.free(block.address)

    def context(self) -> AbstractContextManager[Any]:
        """Return the context in which torch allocates here, on the thread that enters it."""
        import torch

        return torch.cuda.use_mem_pool(self.torch_pool())

    def release_memory(self) -> None:
        """Give the memory back to the device. Idempotent. No other process may map it any more."""
        import torch

        if self.num_bytes and torch.cuda.is_available():
            torch.cuda.synchronize()  # work that is launched may still use it
        super().release_memory()


@dataclass(frozen=True)
class PoolOffer:
    """The pool that vLLM is offered, or why none is. Neither: exported memory is not wanted."""

    pool: CachePool | None = None
    failure: PlacementFailure | None = None


def offer_pool(setting: str, *, is_child: bool) -> PoolOffer:
    """Return the pool for this process's current device. Raises nothing: without a pool, vLLM has its own.

    `setting`: `placement`. `is_child`: whether the connector is one of several in a MultiConnector, of
    which vLLM lets one provide a pool.
    """
    import torch

    if setting == "resident" or not torch.cuda.is_available():
        return PoolOffer()
    if torch.version.hip is not None:
        return PoolOffer(failure=PlacementFailure("ROCm's memory is not exported by kvxferd", ""))
    if is_child and setting == "auto":
        return PoolOffer(
            failure=PlacementFailure(
                "vLLM takes a pool of one connector alone inside a MultiConnector",
                'set "placement": "child" for this connector, if no other has a pool',
            )
        )
    for name in ALLOCATOR_VARIABLES:
        if "expandable_segments:true" in os.environ.get(name, "").replace(" ", "").lower():
            return PoolOffer(
                failure=PlacementFailure(
                    "torch's pools do not go with expandable segments", f"run: unset {name}"
                )
            )
    offered = open_pool(torch.cuda.current_device())
    if offered.pool is None:
        return offered
    try:
        offered.pool.context()
    except Exception as error:  # torch's own functions, which differ between versions
        return PoolOffer(failure=PlacementFailure(f"torch makes no pool of it: {error!r}", ""))
    return offered


def open_pool(ordinal: int) -> PoolOffer:
    """Return a pool on the device that torch calls `ordinal`, or why there is none."""
    try:
        driver = open_driver()
        device = next((d for d in driver.devices() if d.ordinal == ordinal), None)
        if device is None:
            raise DeviceError(f"cannot use device {ordinal}: the driver shows {len(driver.devices())}")
        return PoolOffer(CachePool(device.uuid, driver))
    except KvxferdError as error:
        # Bindings that are missing are missing for every placement, whose search names what to install.
        mend = "" if isinstance(error.__cause__, ImportError) else DOCTOR_HERE
        return PoolOffer(failure=PlacementFailure(error.message, mend))
