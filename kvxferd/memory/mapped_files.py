"""This process's mappings, as /proc/self/maps lists them, and which of them are sealed memory."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from kvxferd.errors import Code, EngineError

if TYPE_CHECKING:
    from kvxferd.memory.memfd import SealedMemory

# Every sealed memory of this process; weak, because the memory goes with its last user.
_SEALED: weakref.WeakSet[SealedMemory] = weakref.WeakSet()


class MapsEntry(NamedTuple):
    """A line of /proc/self/maps."""

    start: int
    end: int
    permissions: str
    offset: int  # of the mapping in its file
    device: str  # of the file: "MAJOR:MINOR", hexadecimal
    inode: int  # a number of that device
    name: str

    @property
    def file(self) -> tuple[str, int]:
        """Which file it is: device and inode."""
        return self.device, self.inode


def read_maps() -> Iterator[MapsEntry]:
    """Yield this process's mappings, in order."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            places, permissions, offset, device, inode, *names = line.split(maxsplit=5)
            start, end = (int(place, 16) for place in places.split("-"))
            name = names[0].strip() if names else ""
            yield MapsEntry(start, end, permissions, int(offset, 16), device, int(inode), name)


def remember_sealed(memory: SealedMemory) -> None:
    """Let `find_sealed_memory` find this memory, as long as it is there."""
    _SEALED.add(memory)


def find_sealed_memory(start: int, end: int) -> tuple[SealedMemory, int]:
    """Return the sealed memory that is mapped at these addresses, and the offset of `start` in it.

    The kernel's list decides, so that memory which was unmapped meanwhile is not found. Raises
    EngineError(region-invalid).
    """
    found: MapsEntry | None = None
    at = start
    for entry in read_maps():
        if entry.end <= at:
            continue
        if entry.start > at or not entry.permissions.startswith("rw-s"):
            break
        if found is not None and (
            entry.file != found.file or entry.offset - found.offset != at - found.start
        ):
            break
        found = found or entry
        at = entry.end
        if at >= end:
            break
    if found is None or at < end:
        raise EngineError("it is not in a memfd: allocate it from SealedMemory.torch()", Code.REGION_INVALID)
    for memory in list(_SEALED):
        if memory.fd >= 0 and _file_of(memory.fd) == found.file:
            return memory, found.offset + start - found.start
    raise EngineError(
        f"it is in shared memory of another origin ({found.name}): allocate it from SealedMemory.torch()",
        Code.REGION_INVALID,
    )


def _file_of(fd: int) -> tuple[str, int]:
    """Return which file a descriptor is of, as `MapsEntry.file` does."""
    status = os.fstat(fd)
    return f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}", status.st_ino
