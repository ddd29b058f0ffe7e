"""A rank's memory as the daemon receives it: descriptors, and where each region lies in them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, Protocol

from kvxferd.errors import Code, DeviceError, EngineError
from kvxferd.frame_socket import close_fds
from kvxferd.ids import Incarnation, RegionId
from kvxferd.layout import RankLayout, RegionSpec
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


# The memory of each region, by the region's id in the layout, which also has its size.
Regions = Mapping[RegionId, Memory | SharedMemory] | Mapping[str, Memory | SharedMemory]


class _Place(NamedTuple):
    """Where a region lies."""

    region: RegionId
    size_bytes: int
    memory: Memory
    offset: int  # bytes from the start of `memory`


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

    def __init__(self, places: Iterable[_Place]) -> None:
        """Collect the memories. Raises EngineError for too many."""
        self._memfds: dict[int, int] = {}  # the engine's descriptor: position
        found: dict[tuple[str, AddressRange], DeviceMemory] = {}
        for place in places:
            memory = place.memory
            if isinstance(memory, DeviceMemory):
                under = memory.allocations_under(place.offset, place.size_bytes)
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

    def describe(self, place: _Place) -> RegionExport:
        """Return where a region lies in the descriptors."""
        region, size_bytes, memory, offset = place
        if isinstance(memory, ResidentMemory):
            address = memory.address + offset
            return RegionExport(region, size_bytes, kind="resident", device=memory.device, address=address)
        if not isinstance(memory, DeviceMemory):
            return RegionExport(region, size_bytes, self._memfds[memory.fd], offset)
        under = memory.allocations_under(offset, size_bytes)
        return RegionExport(
            region,
            size_bytes,
            self._positions[memory.device, under[0]],
            memory.address + offset - under[0].base,
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
    by_id = {RegionId(name): memory for name, memory in regions.items()}
    _check_names(layout, by_id)
    places = [_place_of(spec, by_id[spec.region]) for spec in layout.regions]
    sources = FdTable(places)
    owners = tuple(
        owner for place in places if isinstance(place.memory, ResidentMemory) for owner in place.memory.owners
    )
    return MemoryExport(tuple(map(sources.describe, places)), sources.open_fds(), owners)


def _check_names(layout: RankLayout, by_id: Collection[RegionId]) -> None:
    named = [spec.region for spec in layout.regions]
    if len(named) > MAX_REGIONS:
        raise EngineError(f"cannot export {len(named)} regions, at most {MAX_REGIONS}", Code.REGION_INVALID)
    if missing := sorted(set(named) - set(by_id)):
        raise EngineError(f"cannot export: no memory given for regions {missing}", Code.REGION_INVALID)
    if unnamed := sorted(set(by_id) - set(named)):
        raise EngineError(f"cannot export: the layout has no regions {unnamed}", Code.REGION_INVALID)


def _place_of(spec: RegionSpec, given: Memory | SharedMemory) -> _Place:
    memory, offset = (given.memory, given.offset) if isinstance(given, SharedMemory) else (given, 0)
    if not hasattr(memory, "size_bytes"):
        raise EngineError(
            f"cannot export region {spec.region!r} of {memory!r:.80}: give what `kvxferd.memory.share` "
            "returns, a SealedMemory, a DeviceMemory or a ResidentMemory",
            Code.REGION_INVALID,
        )
    if offset < 0:
        raise EngineError(
            f"cannot export region {spec.region!r} at offset {offset}: give 0 or more", Code.REGION_INVALID
        )
    if offset + spec.size_bytes > memory.size_bytes:
        raise EngineError(
            f"cannot export region {spec.region!r}: bytes {offset} to {offset + spec.size_bytes} "
            f"of a memory of {memory.size_bytes}",
            Code.REGION_TOO_SMALL,
        )
    return _Place(spec.region, spec.size_bytes, memory, offset)
