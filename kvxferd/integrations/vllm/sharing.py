"""How the daemon gets at a rank's memory: adopted in place, or copied through a shared buffer."""

from __future__ import annotations

import dataclasses

from kvxferd.client import Region
from kvxferd.errors import Code, EngineError
from kvxferd.ids import RegionId
from kvxferd.integrations.vllm.derivation import CacheStorage, DerivedCaches
from kvxferd.integrations.vllm.mirror import Mirror
from kvxferd.memory import SealedMemory
from kvxferd.memory.adopt import adopt as adopt_pages


@dataclasses.dataclass(frozen=True)
class Shared:
    """A rank's memory as the daemon's mover can map it. Keep it while the rank is registered."""

    regions: tuple[Region, ...]
    report: tuple[str, ...]  # one sentence for each allocation: which way, and why not the better one
    mirror: Mirror | None = None  # for what is not adopted; None: there is nothing to copy

    def close(self) -> None:
        """Close the descriptors. Adopted memory stays what it is."""
        for memory in {id(region.memory): region.memory for region in self.regions}.values():
            if isinstance(memory, SealedMemory):
                memory.close()


def share(derived: DerivedCaches, *, adopt: bool = True) -> Shared:
    """Make a rank's memory mappable. Call it before the engine's first forward pass, or while it rests.

    Without `adopt`, host memory is always copied through a shared buffer. Raises EngineError
    (region-invalid) for device memory that cannot be exported.
    """
    regions: list[Region] = []
    report: list[str] = []
    buffers: dict[RegionId, SealedMemory] = {}
    try:
        for storage in derived.storages:
            if storage.device != "cpu":
                regions.append(device_region(storage))
                report.append(f"{_named(storage)} is exported as it is")
                continue
            region, why_not = _adopted(storage) if adopt else (None, "adopt_cpu_memory is off")
            if region is None:
                buffers[storage.region] = SealedMemory.create(storage.size_bytes, "kvxferd-mirror")
                region = Region(storage.region, buffers[storage.region])
                report.append(f"{_named(storage)} is copied through a shared buffer: {why_not}")
            else:
                report.append(f"{_named(storage)} is adopted in place: the daemon maps it, nothing is copied")
            regions.append(region)
        mirror = Mirror(derived, buffers) if buffers else None
    except BaseException:
        Shared(tuple(regions), ()).close()
        raise
    return Shared(tuple(regions), tuple(report), mirror)


def device_region(storage: CacheStorage) -> Region:
    """Return the region of memory on a device. Raises EngineError."""
    raise EngineError(
        f"cannot export {_named(storage)}: GPU memory is not supported by this version of the connector",
        Code.REGION_INVALID,
    )


def _adopted(storage: CacheStorage) -> tuple[Region | None, str]:
    """Return a host allocation's region with its own memory under it, or None and why not."""
    try:
        found = adopt_pages(storage.address, storage.size_bytes, allocated_at=storage.owner.data_ptr())
    except EngineError as error:
        return None, error.message
    return Region(storage.region, found.memory, found.offset), ""


def _named(storage: CacheStorage) -> str:
    return f"{storage.region} ({storage.size_bytes / 2**20:.1f} MiB on {storage.device})"
