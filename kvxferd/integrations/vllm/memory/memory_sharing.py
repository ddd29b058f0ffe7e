"""Make a rank's memory readable for the daemon: adopted in place, or copied through a shared buffer."""

from __future__ import annotations

import dataclasses

from kvxferd.client import Client, RankHandle, Region
from kvxferd.errors import EngineError
from kvxferd.ids import RegionId
from kvxferd.integrations.vllm.layout.derivation import CacheStorage, DerivedCaches
from kvxferd.integrations.vllm.memory.bounce_buffers import BounceBuffers
from kvxferd.integrations.vllm.memory.gpu_placement import GpuPlacement
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.memory import SealedMemory
from kvxferd.memory.adopt import adopt as adopt_pages
from kvxferd.memory.device import DeviceMemory, ResidentMemory
from kvxferd.memory.driver_registry import open_driver


@dataclasses.dataclass(frozen=True)
class SharedCaches:
    """A rank's regions, as a mover can map them. Keep it while the rank is registered."""

    regions: tuple[Region, ...]
    report: tuple[str, ...]  # one sentence for each allocation: how it is shared, and why not adopted
    bounce_buffers: BounceBuffers | None = None  # for memory that is not adopted; None: all of it is
    storages: tuple[CacheStorage, ...] = ()  # the regions' allocations, in the same order

    @property
    def is_resident(self) -> bool:
        """Whether the mover must be a thread of this process."""
        return any(isinstance(region.memory, ResidentMemory) for region in self.regions)

    def export_again(self) -> tuple[Region, ...]:
        """Return the regions after device memory was freed and allocated again at the same addresses.

        Host memory is unchanged, and so is the placement. Raises DeviceError as `share_memory` does.
        """
        placement = GpuPlacement.RESIDENT if self.is_resident else GpuPlacement.EXPORTED
        return tuple(
            region if storage.device == "cpu" else device_region(storage, placement)[0]
            for region, storage in zip(self.regions, self.storages, strict=True)
        )

    def close(self) -> None:
        """Close the file descriptors. Adopted memory is unchanged."""
        for memory in {id(region.memory): region.memory for region in self.regions}.values():
            if isinstance(memory, SealedMemory):
                memory.close()


def share_memory(
    derived: DerivedCaches, placement: GpuPlacement = GpuPlacement.EXPORTED, *, adopt: bool = True
) -> SharedCaches:
    """Make a rank's memory mappable. Call it before the engine's first forward pass, or between steps.

    `placement` is the rank's; host memory alone is always exported. Without `adopt`, host memory is always
    copied through a shared buffer. Raises DeviceError: region-not-exportable for memory that has to be
    resident, device-unavailable where no driver can be used.
    """
    regions: list[Region] = []
    report: list[str] = []
    buffers: dict[RegionId, SealedMemory] = {}
    try:
        for storage in derived.storages:
            if storage.device != "cpu" or placement is GpuPlacement.RESIDENT:
                region, how = device_region(storage, placement)
                regions.append(region)
                report.append(f"{_describe(storage)} {how}")
                continue
            found, why_not = _try_adopt(storage) if adopt else (None, "adopt_cpu_memory is off")
            if found is None:
                buffers[storage.region] = SealedMemory.create(storage.size_bytes, "kvxferd-mirror")
                region = Region(storage.region, buffers[storage.region])
                report.append(f"{_describe(storage)} is copied through a shared buffer: {why_not}")
            else:
                report.append(
                    f"{_describe(storage)} is adopted in place: the daemon maps it, nothing is copied"
                )
                region = found
            regions.append(region)
        bounce_buffers = BounceBuffers(derived, buffers) if buffers else None
    except BaseException:
        SharedCaches(tuple(regions), ()).close()
        raise
    return SharedCaches(tuple(regions), tuple(report), bounce_buffers, derived.storages)


def device_region(storage: CacheStorage, placement: GpuPlacement) -> tuple[Region, str]:
    """Return the region of device memory, and a sentence on how it is shared. Raises DeviceError.

    Only memory that was allocated to be shared can be exported (CUDA VMM with a shareable handle). A
    thread of this process reads any.
    """
    if placement is GpuPlacement.EXPORTED:
        exported = DeviceMemory(storage.address, storage.size_bytes, open_driver())
        return Region(storage.region, exported), "is exported to the daemon's mover"
    # The thread reads all of the rank's memory, so a cache that lies on the host is this process's too.
    device = "" if storage.device == "cpu" else open_driver().device_of(storage.address)
    resident = ResidentMemory(storage.address, storage.size_bytes, device)
    return Region(storage.region, resident), "is read by a thread of this worker"


def register_rank(
    connection: Client, spec: EngineSpec, layout: RankLayout, shared: SharedCaches, timeout_s: float
) -> RankHandle:
    """Register a rank with its memory, and start its mover here if no other process can map the memory.

    Blocks and raises as `Client.register` does.
    """
    if not shared.is_resident:
        return connection.register(spec, layout, shared.regions, timeout_s)
    # The worker imports NIXL only for this.
    from kvxferd import resident

    memories = {r.region: r.memory for r in shared.regions if isinstance(r.memory, ResidentMemory)}
    return resident.register(connection, spec, layout, memories, timeout_s)


def _try_adopt(storage: CacheStorage) -> tuple[Region | None, str]:
    """Return the region of a host allocation shared in place, or None and the reason."""
    try:
        found = adopt_pages(storage.address, storage.size_bytes, allocated_at=storage.owner.data_ptr())
    except EngineError as error:
        return None, error.message
    return Region(storage.region, found.memory, found.offset), ""


def _describe(storage: CacheStorage) -> str:
    return f"{storage.region} ({storage.size_bytes / 2**20:.1f} MiB on {storage.device})"
