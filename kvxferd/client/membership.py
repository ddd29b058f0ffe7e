"""What a session is to its daemon: a rank with memory, or a publisher without."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from kvxferd.errors import Code, EngineError, LayoutError
from kvxferd.ids import EngineId, Generation, Incarnation, RegionId
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.wire import worker
from kvxferd.wire.limits import MAX_FDS_PER_FRAME, MAX_REGIONS

T = TypeVar("T")


class Memory(Protocol):
    """A sealed memfd; `kvxferd.memory.SealedMemory` is the usual one."""

    @property
    def fd(self) -> int:
        """Its descriptor."""

    @property
    def size_bytes(self) -> int:
        """Its size."""


@dataclass(frozen=True, slots=True)
class Region:
    """One region of the layout, and where it starts in its memory (a multiple of the page size)."""

    region: RegionId
    memory: Memory
    offset: int = 0


Regions = Mapping[RegionId, Memory] | Iterable[Region]


class Exports:
    """A rank's memory, ready to be sent. Owns duplicates of the descriptors until `close`."""

    def __init__(self, regions: tuple[worker.RegionExport, ...], fds: tuple[int, ...]) -> None:
        self.regions = regions
        self.fds = fds
        self.incarnation = Incarnation(secrets.token_hex(8))  # of this mapping of the memory

    def close(self) -> None:
        """Let go of the memory: nothing here keeps it alive any more. Idempotent."""
        fds, self.fds = self.fds, ()
        for fd in fds:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class RankMember:
    """A rank; `exports` is None while its memory is suspended."""

    engine: EngineSpec
    layout: RankLayout
    exports: Exports | None

    @property
    def engine_id(self) -> EngineId:
        """The engine that it is a rank of."""
        return self.engine.engine_id

    @property
    def generation(self) -> Generation:
        """That engine's start."""
        return self.engine.generation

    def __str__(self) -> str:
        return f"rank {self.engine.rank} of {self.engine.key}"


@dataclass(frozen=True, slots=True)
class PublisherMember:
    """An engine's scheduler: it publishes, and has no memory."""

    engine_id: EngineId
    generation: Generation

    def __str__(self) -> str:
        return f"publisher of {self.engine_id}@{self.generation}"


Member = RankMember | PublisherMember


def export(layout: RankLayout, regions: Regions) -> Exports:
    """Return the layout's regions as descriptors to send. Raises EngineError(region-...).

    Regions in the same memory share a descriptor.
    """
    listed = _listed(regions)
    _check_names(layout, listed)
    fds: dict[int, int] = {}  # the engine's descriptor -> position
    exported: list[worker.RegionExport] = []
    for spec in layout.regions:
        region = listed[spec.region]
        _check_place(region, spec.size_bytes)
        position = fds.setdefault(region.memory.fd, len(fds))
        exported.append(worker.RegionExport(spec.region, spec.size_bytes, position, region.offset))
    if len(fds) > MAX_FDS_PER_FRAME:
        raise EngineError(
            f"cannot export {len(fds)} memories, at most {MAX_FDS_PER_FRAME}: put more regions in one memory",
            Code.REGION_INVALID,
        )
    return Exports(tuple(exported), _duplicates(fds))


def _duplicates(fds: Iterable[int]) -> tuple[int, ...]:
    own: list[int] = []
    try:
        own.extend(os.dup(fd) for fd in fds)
    except OSError as error:
        for fd in own:
            os.close(fd)
        raise EngineError(f"cannot export a region's memory: {error}", Code.REGION_INVALID) from error
    return tuple(own)


def _listed(regions: Regions) -> dict[RegionId, Region]:
    if isinstance(regions, Mapping):
        return {name: Region(name, memory) for name, memory in regions.items()}
    listed: dict[RegionId, Region] = {}
    for region in regions:
        if region.region in listed:
            raise EngineError(f"cannot export region {region.region!r} twice", Code.REGION_INVALID)
        listed[region.region] = region
    return listed


def _check_names(layout: RankLayout, listed: dict[RegionId, Region]) -> None:
    named = [spec.region for spec in layout.regions]
    if len(named) > MAX_REGIONS:
        raise EngineError(f"cannot export {len(named)} regions, at most {MAX_REGIONS}", Code.REGION_INVALID)
    if lacking := sorted(set(named) - listed.keys()):
        raise EngineError(f"cannot export: no memory given for regions {lacking}", Code.REGION_INVALID)
    if unnamed := sorted(listed.keys() - set(named)):
        raise EngineError(f"cannot export: the layout has no regions {unnamed}", Code.REGION_INVALID)


def _check_place(region: Region, size_bytes: int) -> None:
    if region.offset < 0 or region.offset % mmap.PAGESIZE:
        raise EngineError(
            f"cannot export region {region.region!r} at offset {region.offset}: "
            f"give a multiple of the page size, {mmap.PAGESIZE}",
            Code.REGION_INVALID,
        )
    if region.offset + size_bytes > region.memory.size_bytes:
        raise EngineError(
            f"cannot export region {region.region!r}: bytes {region.offset} to {region.offset + size_bytes} "
            f"of a memory of {region.memory.size_bytes}",
            Code.REGION_TOO_SMALL,
        )


def checked(value: T, what: str) -> T:
    """Return an engine's struct as the daemon will see it. Raises LayoutError naming the wrong field.

    msgspec checks types when it decodes, not when a struct is made.
    """
    try:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value))
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError) as error:
        raise LayoutError(f"cannot register: {what}: {error}") from error
