"""A rank's memory as the daemon receives it: descriptors, and where each region lies in them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvxferd.errors import Code, DeviceError, EngineError
from kvxferd.frame_socket import close_fds
from kvxferd.ids import Incarnation, RegionId
from kvxferd.layout import RankLayout
from kvxferd.memory import SharedMemory
from kvxferd.memory.device import DeviceMemory, ResidentMemory
from kvxferd.memory.driver import AddressRange
from kvxferd.wire.limits import MAX_DESCRIPTORS_PER_RANK, MAX_REGIONS
from kvxferd.wire.worker import RegionExport


class MemfdMemory(Protocol):
    """A sealed memfd; `kvxferd.memory.SealedMemory` is the usual one."""

    @property
    def fd(self) -> int:
        """The memfd's descriptor."""

    @property
    def size_bytes(self) -> int:
        """The memfd's size."""


Memory = MemfdMemory | DeviceMemory | ResidentMemory


@dataclass(frozen=True, slots=True)
class Region:
    """One region of the layout, and where it lies in the engine's memory.

    Attributes:
        region: the region's id in the layout, which also gives its size.
        memory: a `kvxferd.memory.SealedMemory` or another sealed memfd, a `DeviceMemory` of a GPU, or a
            `ResidentMemory`, which only this process can reach.
        offset: bytes from the start of `memory`.
    """

    region: RegionId
    memory: Memory
    offset: int = 0


RegionMemory = Memory | SharedMemory
Regions = Mapping[RegionId, RegionMemory] | Mapping[str, RegionMemory] | Iterable[Region]


class MemoryExport:
    """A rank's memory, ready to be sent. Owns duplicates of the descriptors until `close`."""

    def __init__(
        self, regions: tuple[RegionExport, ...], fds: tuple[int, ...], owners: tuple[object, ...] = ()
    ) -> None:
        self.regions = regions
        self.fds = fds
        self.owners = owners  # what must not be freed while a mover of this process may use the memory
        self.incarnation = Incarnation(secrets.token_hex(8))  # of this mapping of the memory

    @property
    def placement(self) -> str:
        """Where the mover must run: a thread of this process if only that can reach one of the regions."""
        return "resident" if any(region.kind == "resident" for region in self.regions) else "child"

    def close(self) -> None:
        """Close the descriptors: nothing here keeps the memory alive any more. Idempotent."""
        self.owners = ()
        fds, self.fds = self.fds, ()
        for fd in fds:
            os.close(fd)


class FdTable:
    """The descriptors of a rank's memories: memfds first, then a GPU's allocations in order of address.

    So the allocations under a region have consecutive descriptors, and regions share the descriptors of
    allocations that they share.
    """

    def __init__(self, sized: Iterable[tuple[Region, int]]) -> None:
        """Collect the memories of regions and their sizes in bytes. Raises EngineError for too many."""
        self._memfds: dict[int, int] = {}  # the engine's descriptor: position
        found: dict[tuple[str, AddressRange], DeviceMemory] = {}
        for region, size_bytes in sized:
            memory = region.memory
            if isinstance(memory, DeviceMemory):
                under = memory.allocations_under(region.offset, size_bytes)
                found.update({(memory.device, allocation): memory for allocation in under})
            elif not isinstance(memory, ResidentMemory):
                self._memfds.setdefault(memory.fd, len(self._memfds))
        self._allocations = sorted(found.items(), key=lambda item: item[0])
        self._positions = {
            key: number for number, (key, _) in enumerate(self._allocations, len(self._memfds))
        }
        if (count := len(self._memfds) + len(found)) > MAX_DESCRIPTORS_PER_RANK:
            raise EngineError(
                f"cannot export {count} memories, at most {MAX_DESCRIPTORS_PER_RANK}: put more regions in "
                "one, or allocate a GPU's cache from kvxferd.memory.device_pool",
                Code.REGION_INVALID,
            )

    def describe(self, region: Region, size_bytes: int) -> RegionExport:
        """Return where a region lies in the descriptors."""
        memory = region.memory
        if isinstance(memory, ResidentMemory):
            address = memory.address + region.offset
            return RegionExport(
                region.region, size_bytes, kind="resident", device=memory.device, address=address
            )
        if not isinstance(memory, DeviceMemory):
            return RegionExport(region.region, size_bytes, self._memfds[memory.fd], region.offset)
        under = memory.allocations_under(region.offset, size_bytes)
        return RegionExport(
            region.region,
            size_bytes,
            self._positions[memory.device, under[0]],
            memory.address + region.offset - under[0].base,
            kind="vmm",
            device=memory.device,
            pieces=tuple(allocation.size_bytes for allocation in under),
        )

    def open_fds(self) -> tuple[int, ...]:
        """Return the descriptors; the caller closes them. Leaves none open if it raises.

        Raises EngineError or DeviceError.
        """
        own: list[int] = []
        try:
            own.extend(os.dup(fd) for fd in self._memfds)
            own.extend(memory.export(allocation) for (_, allocation), memory in self._allocations)
        except OSError as error:
            close_fds(own)
            raise EngineError(f"cannot export a region's memory: {error}", Code.REGION_INVALID) from error
        except DeviceError:
            close_fds(own)
            raise
        return tuple(own)


def export_memory(layout: RankLayout, regions: Regions) -> MemoryExport:
    """Return the layout's regions as descriptors to send. Raises EngineError(region-...), DeviceError.

    Regions in the same memory share descriptors.
    """
    listed = _by_region_id(regions)
    _check_names(layout, listed)
    sized = [(listed[spec.region], spec.size_bytes) for spec in layout.regions]
    for region, size_bytes in sized:
        _check_bounds(region, size_bytes)
    sources = FdTable(sized)
    owners = tuple(
        owner
        for region, _ in sized
        if isinstance(region.memory, ResidentMemory)
        for owner in region.memory.owners
    )
    return MemoryExport(tuple(sources.describe(*region) for region in sized), sources.open_fds(), owners)


def _by_region_id(regions: Regions) -> dict[RegionId, Region]:
    if isinstance(regions, Mapping):
        return {RegionId(name): _region_of(RegionId(name), memory) for name, memory in regions.items()}
    listed: dict[RegionId, Region] = {}
    for region in regions:
        if region.region in listed:
            raise EngineError(f"cannot export region {region.region!r} twice", Code.REGION_INVALID)
        listed[region.region] = region
    return listed


def _region_of(name: RegionId, memory: RegionMemory) -> Region:
    if isinstance(memory, SharedMemory):
        return Region(name, memory.memory, memory.offset)
    return Region(name, memory)


def _check_names(layout: RankLayout, listed: dict[RegionId, Region]) -> None:
    named = [spec.region for spec in layout.regions]
    if len(named) > MAX_REGIONS:
        raise EngineError(f"cannot export {len(named)} regions, at most {MAX_REGIONS}", Code.REGION_INVALID)
    if missing := sorted(set(named) - listed.keys()):
        raise EngineError(f"cannot export: no memory given for regions {missing}", Code.REGION_INVALID)
    if unnamed := sorted(listed.keys() - set(named)):
        raise EngineError(f"cannot export: the layout has no regions {unnamed}", Code.REGION_INVALID)


def _check_bounds(region: Region, size_bytes: int) -> None:
    if region.offset < 0:
        raise EngineError(
            f"cannot export region {region.region!r} at offset {region.offset}: give 0 or more",
            Code.REGION_INVALID,
        )
    if region.offset + size_bytes > region.memory.size_bytes:
        raise EngineError(
            f"cannot export region {region.region!r}: bytes {region.offset} to {region.offset + size_bytes} "
            f"of a memory of {region.memory.size_bytes}",
            Code.REGION_TOO_SMALL,
        )
