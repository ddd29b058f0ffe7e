"""Sharing an engine's tensors with the daemon: the first placement that works for each allocation.

Host memory is, in order of preference:

* `memfd`: the tensor lies in a `SealedMemory` of this process already;
* `adopted`: its pages are exchanged for a sealed memfd, in place (`kvxferd.memory.adopt`);
* `resident`: only this process can reach it, so the rank's mover is a thread here.

Device memory is `exported` (allocated to be shared, as by `DevicePool` or expandable segments), else
`resident`. A rank has one mover: where one allocation is resident, all are. Such a rank is registered through
`kvxferd.resident`, and needs a transfer library in this process.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.layout import TensorRegion, tensor_regions
from kvxferd.layout.tensor_views import TensorLike
from kvxferd.memory.adopt import adopt
from kvxferd.memory.device import DeviceMemory, ResidentMemory
from kvxferd.memory.driver_registry import open_driver
from kvxferd.memory.mapped_files import find_sealed_memory
from kvxferd.memory.memfd import SealedMemory

_TRANSFER_LIBRARIES = ("nixl", "rixl")


class MemoryPlacement(StrEnum):
    """How the daemon reaches a tensor's memory."""

    MEMFD = "memfd"  # host: a child mover maps it
    ADOPTED = "adopted"  # host: its pages became a memfd's, and a child mover maps it
    EXPORTED = "exported"  # device: a child mover maps it
    RESIDENT = "resident"  # host or device: a thread of this process reads and writes it


@dataclasses.dataclass(frozen=True)
class SharedMemory:
    """One region's memory as it is registered. `register` and `resume` take it as it is.

    Attributes:
        memory: what is registered.
        offset: the bytes of `memory` before the region.
        size_bytes: the region's size.
        placement: how the daemon reaches it.
        passed_over: the placements that were tried before, and why they do not work here.
    """

    memory: SealedMemory | DeviceMemory | ResidentMemory
    offset: int
    size_bytes: int
    placement: MemoryPlacement
    passed_over: Mapping[MemoryPlacement, str]
    owners: tuple[object, ...] = dataclasses.field(default=(), repr=False, compare=False)

    @property
    def is_resident(self) -> bool:
        """Whether the rank's mover must be a thread of this process."""
        return self.placement is MemoryPlacement.RESIDENT

    def close(self) -> None:
        """Close the descriptor of adopted memory. The tensor stays, and so does a rank that is registered."""
        if self.placement is MemoryPlacement.ADOPTED and isinstance(self.memory, SealedMemory):
            self.memory.close()


def share(tensor: TensorLike, placements: Sequence[str] | None = None) -> SharedMemory:
    """Return the allocation under one tensor, ready to be registered as a region. See `share_all`."""
    (shared,) = share_all({"tensor": tensor}, placements).values()
    return shared


def share_all(
    tensors: Mapping[str, TensorLike], placements: Sequence[str] | None = None
) -> dict[str, SharedMemory]:
    """Return the allocations under these tensors by region id, as the regions of `from_tensors` are.

    Call it before the engine's first forward pass: nothing may write host memory while its pages are
    exchanged (`adopted`), as that write could be lost. A child forked later shares adopted memory instead of
    getting a copy.

    The tensors' storages stay allocated while a rank is registered with the result, even where the engine
    drops its tensors: a mover may still read and write them.

    Args:
        tensors: by the names that `from_tensors` was given.
        placements: those to try, in order: "memfd", "adopted", "exported", "resident". None: all.

    Raises:
        EngineError: no placement works (`region-not-exportable`); the message lists each and why.
        LayoutError: a tensor has no memory.
    """
    return share_regions(tensor_regions(tensors), placements)


def share_regions(
    regions: Sequence[TensorRegion], placements: Sequence[str] | None = None
) -> dict[str, SharedMemory]:
    """Return these allocations by region id, shared as `share_all` does."""
    wanted = tuple(MemoryPlacement) if placements is None else tuple(map(_placement, placements))
    shared: dict[str, SharedMemory] = {}
    try:
        for region in regions:
            shared[region.region] = _share_region(region, wanted)
        if any(one.is_resident for one in shared.values()):
            for region in regions:
                shared[region.region] = _as_resident(shared[region.region], region)
    except BaseException:
        for made in shared.values():
            made.close()
        raise
    return shared


def _placement(name: str) -> MemoryPlacement:
    try:
        return MemoryPlacement(name)
    except ValueError as error:
        raise EngineError(
            f"cannot share a tensor as {name!r}: there are {', '.join(MemoryPlacement)}", Code.BAD_REQUEST
        ) from error


def _share_region(region: TensorRegion, wanted: Sequence[MemoryPlacement]) -> SharedMemory:
    passed_over: dict[MemoryPlacement, str] = {}
    last: Exception | None = None
    for placement in wanted:
        try:
            memory, offset = _MAKERS[placement](region)
        except (KvxferdError, OSError) as error:
            passed_over[placement] = error.message if isinstance(error, KvxferdError) else str(error)
            last = error
            continue
        return SharedMemory(memory, offset, region.size_bytes, placement, passed_over, region.owners)
    reasons = "; ".join(f"{placement}: {why}" for placement, why in passed_over.items())
    raise EngineError(
        f"cannot share tensor {region.region!r}, {region.size_bytes} bytes on {region.device}: {reasons}",
        Code.REGION_NOT_EXPORTABLE,
    ) from last


def _as_resident(shared: SharedMemory, region: TensorRegion) -> SharedMemory:
    """Return the region for the mover of this process, which another region of the rank needs."""
    if shared.is_resident:
        return shared
    memory, offset = _resident(region)
    shared.close()
    passed_over = {**shared.passed_over, shared.placement: "another allocation of the rank is resident"}
    return SharedMemory(
        memory, offset, region.size_bytes, MemoryPlacement.RESIDENT, passed_over, region.owners
    )


_Made = tuple[SealedMemory | DeviceMemory | ResidentMemory, int]


def _in_memfd(region: TensorRegion) -> _Made:
    _require_device(region, "cpu")
    return find_sealed_memory(region.address, region.end)


def _adopted(region: TensorRegion) -> _Made:
    _require_device(region, "cpu")
    found = adopt(region.address, region.size_bytes)
    return found.memory, found.offset


def _exported(region: TensorRegion) -> _Made:
    if region.device == "cpu":
        raise EngineError("it is host memory, which is shared as a memfd", Code.REGION_INVALID)
    return DeviceMemory(region.address, region.size_bytes), 0


def _resident(region: TensorRegion) -> _Made:
    if not any(importlib.util.find_spec(name) for name in _TRANSFER_LIBRARIES):
        raise EngineError(
            "a mover in this process needs a transfer library: install nixl in this environment",
            Code.NIXL_UNAVAILABLE,
        )
    device = "" if region.device == "cpu" else open_driver().device_of(region.address)
    return ResidentMemory(region.address, region.size_bytes, device, region.owners), 0


def _require_device(region: TensorRegion, device: str) -> None:
    if region.device != device:
        raise EngineError(f"it is on {region.device}", Code.REGION_INVALID)


_MAKERS: Mapping[MemoryPlacement, Callable[[TensorRegion], _Made]] = {
    MemoryPlacement.MEMFD: _in_memfd,
    MemoryPlacement.ADOPTED: _adopted,
    MemoryPlacement.EXPORTED: _exported,
    MemoryPlacement.RESIDENT: _resident,
}
