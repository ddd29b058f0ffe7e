"""Maps a memfd at an address that NIXL descriptors can name."""

from __future__ import annotations

import ctypes
import mmap
import os

from kvxferd.errors import Code, EngineError

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_LIBC.munmap.restype = ctypes.c_int
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

_FAILED = ctypes.c_void_p(-1).value
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10  # not in the mmap module


class Mapping:
    """A readable and writable shared mapping. Its maker calls `unmap`."""

    # Not mmap.mmap: that keeps a duplicate of the descriptor for as long as the mapping lives, and
    # cannot map anything else at the same address.

    def __init__(self, address: int, size_bytes: int) -> None:
        self.address = address
        self.size_bytes = size_bytes

    @property
    def page_address(self) -> int:
        """The address of the page that the memory begins in: the kernel maps whole pages."""
        return self.address - self.address % mmap.PAGESIZE

    @property
    def end(self) -> int:
        """The address after the last byte."""
        return self.address + self.size_bytes

    def view(self) -> memoryview:
        """Return the bytes. The view must not be used after `unmap`."""
        return memoryview((ctypes.c_char * self.size_bytes).from_address(self.address)).cast("B")

    def blank(self) -> None:
        """Release the memory but keep the addresses, at which private zeros are now."""
        # A source that unmaps a page while it is read over TCP dies by SIGSEGV.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        start, length = self.page_address, self.end - self.page_address
        if _LIBC.mmap(start, length, _READ_WRITE, flags, -1, 0) == _FAILED:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def unmap(self) -> None:
        """Unmap the memory. Idempotent."""
        if self.size_bytes:
            _LIBC.munmap(self.page_address, self.end - self.page_address)
            self.size_bytes = 0


def map_memfd(fd: int, size_bytes: int, offset: int = 0) -> Mapping:
    """Map `size_bytes` of the descriptor from `offset` on; the descriptor may be closed afterwards.

    The offset is any: the page that it lies in is mapped from its start. Raises EngineError(region-invalid)
    where the kernel refuses. The caller has checked the descriptor with `check_memfd`.
    """
    if size_bytes <= 0 or offset < 0:
        raise EngineError(
            f"cannot map {size_bytes} bytes at offset {offset}: give a size above 0 and an offset from 0 on",
            Code.REGION_INVALID,
        )
    before = offset % mmap.PAGESIZE
    address = _LIBC.mmap(None, before + size_bytes, _READ_WRITE, mmap.MAP_SHARED, fd, offset - before)
    if address is None or address == _FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise EngineError(f"cannot map {size_bytes} bytes at offset {offset}: {reason}", Code.REGION_INVALID)
    return Mapping(address + before, size_bytes)


def map_over(address: int, size_bytes: int, fd: int, offset: int) -> None:
    """Map a descriptor's bytes in place of the pages that are mapped there, which the caller owns.

    Address, size and offset are multiples of the page size. Raises OSError, and then changes nothing.
    """
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if _LIBC.mmap(address, size_bytes, _READ_WRITE, flags, fd, offset) == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
