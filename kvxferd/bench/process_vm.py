"""Whether this machine lets one process read another's memory; otherwise UCX silently falls back to TCP."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from kvxferd.bench.hosts import TOOL
from kvxferd.errors import KvxferdError

_LIBC = ctypes.CDLL(None, use_errno=True)


class Iovec(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


def require_cma(pid: int) -> None:
    """Read a few bytes of a process as UCX's CMA would. Raises KvxferdError if the kernel refuses."""
    start = int(Path(f"/proc/{pid}/maps").read_text().split("-", 1)[0], 16)
    here = ctypes.create_string_buffer(8)
    local = Iovec(ctypes.addressof(here), len(here))
    remote = Iovec(start, len(here))
    if _LIBC.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) != len(here):
        reason = os.strerror(ctypes.get_errno())
        raise KvxferdError(
            f"cannot run {TOOL} over cma: the kernel does not let one process read another's memory "
            f"({reason}); use --transport tcp"
        )
