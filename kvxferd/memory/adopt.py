"""Adopting memory: an allocation's pages are exchanged, in place, for a shared mapping with the same content.

No other process can map memory that an engine has allocated for itself. Where the allocation is provably
a mapping of its own, a sealed memfd can be put under it: addresses and content stay, and the engine need
not change. glibc maps every block of 32 MiB or more by itself (smaller ones too, until some were freed) and
writes the mapping's beginning and end into a header before the block. That header is read here, checked
against /proc/self/maps, and believed only if `malloc` is glibc's. Blocks of other allocators (tcmalloc,
jemalloc) share their mappings, and are refused.

Nothing may write the memory while it is exchanged, as that write could be lost: adopt before the
engine's first forward pass. Freeing the memory later works as before: glibc unmaps it, and the pages
live on for as long as a process has the descriptor. A child forked after adoption shares the memory
instead of getting a copy.

Transparent huge pages are lost in the exchange, unless the system gives them to shared memory as well
(/sys/kernel/mm/transparent_hugepage/shmem_enabled). A NUMA policy set on the old mapping is lost too; the
process's own policy applies to pages that are touched again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import NamedTuple

from kvxferd.errors import Code, EngineError
from kvxferd.memory.mapped_files import read_maps
from kvxferd.memory.mapping import Mapping, map_over
from kvxferd.memory.memfd import SealedMemory

_LIBC = ctypes.CDLL(None)
_LIBC.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

_WORD = ctypes.sizeof(ctypes.c_size_t)
# glibc's header of a block is the two words before the address that malloc returns. The second holds the
# size, and in its three lowest bits: previous block in use, block is a mapping of its own, block of another
# arena.
_HEADER_BYTES = 2 * _WORD
_MMAPPED_FLAG = 0x2
_FLAGS_MASK = 0x7
# Exchanged in steps, so that little memory is there twice; a step that is all zeros takes none.
_STEP_BYTES = 16 << 20


class Adopted(NamedTuple):
    """Memory that other processes can map, and the offset in it at which the adopted range begins."""

    memory: SealedMemory
    offset: int  # bytes


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def adopt(address: int, size_bytes: int) -> Adopted:
    """Exchange the pages under the block that malloc returned, and return the memory that is there now.

    Raises EngineError(region-invalid) with the reason, and then nothing has changed.
    """
    start, length = _mapping_of_block(address)
    if not 0 <= start + length - (address + size_bytes) < mmap.PAGESIZE:
        raise _cannot_adopt(
            address,
            f"its {size_bytes} bytes are not the whole block that glibc mapped, {length} at {start:#x}",
        )
    memory = SealedMemory.create(length, "kvxferd-adopted")
    done = start
    try:
        while done < start + length:
            step = min(_STEP_BYTES, start + length - done)
            _exchange_pages(memory, start, done, step)
            done += step
    except OSError as error:
        _make_private_again(start, done - start)
        memory.close()
        raise _cannot_adopt(address, f"the kernel refused: {error}") from error
    return Adopted(memory, address - start)


def _exchange_pages(memory: SealedMemory, start: int, at: int, length: int) -> None:
    """Copy some pages, then put the copy in their place."""
    if not _is_zero(at, length):
        content = memoryview((ctypes.c_char * length).from_address(at)).cast("B")
        written = 0
        while written < length:
            written += os.pwrite(memory.fd, content[written:], at - start + written)
    map_over(at, length, memory.fd, at - start)


def _make_private_again(start: int, length: int) -> None:
    """Make the first bytes of a mapping private again, with their content."""
    for at in range(start, start + length, _STEP_BYTES):
        step = min(_STEP_BYTES, start + length - at)
        content = ctypes.string_at(at, step)
        Mapping(at, step).blank()
        ctypes.memmove(at, content, step)


def _mapping_of_block(block: int) -> tuple[int, int]:
    """Return start and length of the mapping that glibc made for this block alone. Raises EngineError."""
    allocators = _malloc_libraries()
    if not all(Path(file).name.startswith("libc.so") for file in allocators):
        names = " and ".join(allocators)
        raise _cannot_adopt(block, f"malloc is {names}, whose blocks share their mappings")
    header = block - _HEADER_BYTES
    if not _is_private(header, block):
        raise _cannot_adopt(
            block, "malloc did not return it: no header before it is in private anonymous memory"
        )
    before = ctypes.c_size_t.from_address(header).value
    size = ctypes.c_size_t.from_address(header + _WORD).value
    start, length = header - before, before + (size & ~_FLAGS_MASK)
    if (
        size & _FLAGS_MASK != _MMAPPED_FLAG
        or start % mmap.PAGESIZE
        or length % mmap.PAGESIZE
        or length <= 0
        or start + length <= block
    ):
        raise _cannot_adopt(block, "glibc has not mapped it by itself, other blocks may share its pages")
    if not _is_private(start, start + length):
        raise _cannot_adopt(block, f"its {length} bytes at {start:#x} are not all private anonymous memory")
    return start, length


def _malloc_libraries() -> list[str]:
    """Return the paths of the libraries whose malloc, posix_memalign and free this process uses."""
    libc = ctypes.CDLL(None)
    libc.dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_DlInfo)]
    files = set()
    for function in (libc.malloc, libc.posix_memalign, libc.free):
        found = _DlInfo()
        if not libc.dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(found)) or not found.file:
            return ["unknown"]
        files.add(os.path.realpath(found.file.decode()))
    if len(files) > 1:
        # What an executable calls may have an address of its own in it (Debian's Python is linked so). One
        # that has an allocator of its own has all of these functions.
        files.discard(os.path.realpath("/proc/self/exe"))
    return sorted(files)


def _is_private(start: int, end: int) -> bool:
    """Whether all of a range is readable, writable, private memory without a file or a name."""
    at = start
    for mapped in read_maps():
        if mapped.end <= at:
            continue
        if mapped.start > at or mapped.permissions != "rw-p" or mapped.name:
            return False
        at = mapped.end
        if at >= end:
            return True
    return False


def _is_zero(at: int, length: int) -> bool:
    """Whether all bytes are 0, at the speed of memory."""
    first = ctypes.c_char.from_address(at).value
    return first == b"\0" and not _LIBC.memcmp(at, at + 1, length - 1)


def _cannot_adopt(address: int, why: str) -> EngineError:
    return EngineError(f"cannot adopt the memory at {address:#x}: {why}", Code.REGION_INVALID)
