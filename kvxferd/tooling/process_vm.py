"""Reads another process's memory with process_vm_readv, as UCX's CMA does."""

from __future__ import annotations

import ctypes
import errno

_LIBC = ctypes.CDLL(None, use_errno=True)


class Iovec(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


def read_process_memory(pid: int, address: int, size: int) -> int:
    """Read bytes of a process and discard them; return 0, or the errno where the kernel refuses."""
    target = ctypes.create_string_buffer(size)
    local = Iovec(ctypes.addressof(target), size)
    remote = Iovec(address, size)
    count = _LIBC.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    return 0 if count == size else ctypes.get_errno() or errno.EFAULT
