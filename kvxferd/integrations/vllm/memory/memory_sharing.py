"""Make a rank's memory readable for the daemon: adopted in place, or copied through a shared buffer."""

from __future__ import annotations

import dataclasses
import logging

from kvxferd.client import RankHandle, Region
from kvxferd.engine.placement_search import PlacementSearch
from kvxferd.engine.rank_sharing import RankSharing
from kvxferd.errors import EngineError
from kvxferd.ids import RegionId
from kvxferd.integrations.vllm.layout.derivation import DerivedCaches
from kvxferd.integrations.vllm.memory.bounce_buffers import BounceBuffers
from kvxferd.integrations.vllm.options import Options, connect_to_daemon
from kvxferd.layout import EngineSpec, TensorRegion
from kvxferd.memory import MemoryPlacement, SealedMemory
from kvxferd.memory.adopt import adopt as adopt_pages
from kvxferd.memory.device import DeviceMemory, ResidentMemory
from kvxferd.memory.driver_registry import open_driver

_LOG = logging.getLogger("vllm.kvxferd")


@dataclasses.dataclass(frozen=True)
class SharedCaches:
    """A rank's regions, as a mover can map them. Keep it while the rank is registered."""

    regions: tuple[Region, ...]
    report: tuple[str, ...]  # one sentence for each allocation: how it is shared, and why not adopted
    bounce_buffers: BounceBuffers | None = None  # for memory that is not adopted; None: all of it is
    storages: tuple[TensorRegion, ...] = ()  # the regions' allocations, in the same order

    @property
    def is_resident(self) -> bool:
        """Whether the mover must be a thread of this process."""
        return any(isinstance(region.memory, ResidentMemory) for region in self.regions)

    def export_again(self) -> tuple[Region, ...]:
        """Return the regions after device memory was freed and allocated again at the same addresses.

        Host memory is unchanged, and so is the placement. Raises DeviceError as `share_memory` does.
        """
        placement = MemoryPlacement.RESIDENT if self.is_resident else MemoryPlacement.EXPORTED
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
    derived: DerivedCaches, placement: MemoryPlacement = MemoryPlacement.EXPORTED, *, adopt: bool = True
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
            if storage.device != "cpu" or placement is MemoryPlacement.RESIDENT:
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


def device_region(storage: TensorRegion, placement: MemoryPlacement) -> tuple[Region, str]:
    """Return the region of device memory, and a sentence on how it is shared. Raises DeviceError.

    Only memory that was allocated to be shared can be exported (CUDA VMM with a shareable handle). A
    thread of this process reads any.
    """
    if placement is MemoryPlacement.EXPORTED:
        exported = DeviceMemory(storage.address, storage.size_bytes, open_driver())
        return Region(storage.region, exported), "is exported to the daemon's mover"
    # The thread reads all of the rank's memory, so a cache that lies on the host is this process's too.
    device = "" if storage.device == "cpu" else open_driver().device_of(storage.address)
    resident = ResidentMemory(storage.address, storage.size_bytes, device)
    return Region(storage.region, resident), "is read by a thread of this worker"


def share_rank(
    derived: DerivedCaches, options: Options, search: PlacementSearch | None
) -> RankSharing[SharedCaches]:
    """Share a rank's memory. `search`: the placements of a cache in GPU memory; None: it lies on the host.

    Raises EngineError where no placement's part can be done in this process.
    """

    def share(name: str) -> SharedCaches:
        placement = MemoryPlacement(name or MemoryPlacement.EXPORTED)
        shared = share_memory(derived, placement, adopt=options.adopt_cpu_memory)
        for line in shared.report:
            _LOG.info("%s", line)
        return shared

    return RankSharing(share, search, _LOG)


def register_rank(
    sharing: RankSharing[SharedCaches],
    derived: DerivedCaches,
    options: Options,
    spec: EngineSpec,
    deadline: float,
) -> RankHandle:
    """Register a rank by `deadline` (monotonic seconds), as `RankSharing.register` does."""
    name = f"vllm {spec.engine_id} ({spec.pp_rank}, {spec.tp_rank})"
    return sharing.register(
        lambda: connect_to_daemon(options, name, deadline), spec, derived.layout, deadline
    )


def _try_adopt(storage: TensorRegion) -> tuple[Region | None, str]:
    """Return the region of a host allocation shared in place, or None and the reason."""
    try:
        found = adopt_pages(storage.address, storage.size_bytes)
    except EngineError as error:
        return None, error.message
    return Region(storage.region, found.memory, found.offset), ""


def _describe(storage: TensorRegion) -> str:
    return f"{storage.region} ({storage.size_bytes / 2**20:.1f} MiB on {storage.device})"
