"""Checks that a descriptor is safe to map, and that a registration's regions agree with its descriptors."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Sequence

from kvxferd.errors import Code, EngineError
from kvxferd.wire.limits import MAX_DESCRIPTORS_PER_RANK
from kvxferd.wire.worker import RegionExport

_WRITE_SEALS = fcntl.F_SEAL_WRITE | getattr(fcntl, "F_SEAL_FUTURE_WRITE", 0x10)


def check_memfd(fd: int, needed_bytes: int) -> None:
    """Return if the descriptor is a writable memfd that cannot shrink and holds `needed_bytes`.

    Raises EngineError: region-invalid (not a memfd, or not writable), region-unsealed (its owner
    could shrink it, and a process that maps it would die by SIGBUS), region-too-small.
    """
    try:
        status = os.fstat(fd)
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        access = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    except OSError as error:
        raise EngineError(
            f"cannot use descriptor {fd} as memory: it is not a memfd ({error.strerror})", Code.REGION_INVALID
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise EngineError(f"cannot use descriptor {fd} as memory: it is not a memfd", Code.REGION_INVALID)
    if access != os.O_RDWR or seals & _WRITE_SEALS:
        raise EngineError("cannot use a memfd that may not be written", Code.REGION_INVALID)
    if not seals & fcntl.F_SEAL_SHRINK:
        raise EngineError(
            "cannot use a memfd that may shrink: seal it with F_SEAL_SHRINK", Code.REGION_UNSEALED
        )
    if status.st_size < needed_bytes:
        raise EngineError(
            f"cannot use a memfd of {status.st_size} bytes: {needed_bytes} are needed", Code.REGION_TOO_SMALL
        )


def check_exports(exports: Sequence[RegionExport], fds: Sequence[int]) -> None:
    """Return if every region lies in the given descriptors, and every descriptor belongs to a region.

    The size of a GPU's descriptor is checked by the mover, as only the driver reports it. Raises EngineError:
    as `check_memfd` does, and region-invalid for impossible offsets and sizes.
    """
    named: set[int] = set()
    for export in exports:
        try:
            named.update(_check_export(export, fds))
        except EngineError as error:
            raise EngineError(f"cannot use region {export.region}: {error.message}", error.code) from error
    if len(fds) > MAX_DESCRIPTORS_PER_RANK or named != set(range(len(fds))):
        raise EngineError(
            f"cannot use the regions: they name {len(named)} descriptors, and {len(fds)} came "
            f"(at most {MAX_DESCRIPTORS_PER_RANK})",
            Code.REGION_INVALID,
        )


def _check_export(export: RegionExport, fds: Sequence[int]) -> range:
    """Return the descriptors that the region names."""
    if export.size_bytes < 1 or export.fd_offset < 0:
        raise EngineError("it has no bytes, or starts before its descriptor", Code.REGION_INVALID)
    if export.kind == "resident":
        if export.address < 1:
            raise EngineError("it has no address", Code.REGION_INVALID)
        return range(0)
    pieces = export.pieces if export.kind == "vmm" else (export.fd_offset + export.size_bytes,)
    named = range(export.fd_index, export.fd_index + len(pieces))
    if not 0 <= named.start < named.stop <= len(fds):
        raise EngineError(f"it is in descriptors {named}, and {len(fds)} came", Code.REGION_INVALID)
    if export.kind == "memfd":
        check_memfd(fds[export.fd_index], export.fd_offset + export.size_bytes)
    elif export.kind == "vmm":
        _check_pieces(export)
    else:
        raise EngineError(
            f"kind {export.kind!r} is not known; memfd, vmm and resident are", Code.REGION_INVALID
        )
    return named


def _check_pieces(export: RegionExport) -> None:
    """Return if the allocations under a region are all needed, and enough."""
    needed = export.fd_offset + export.size_bytes
    if (
        not export.device
        or min(export.pieces) < 1
        or export.fd_offset >= export.pieces[0]
        or not sum(export.pieces[:-1]) < needed <= sum(export.pieces)
    ):
        raise EngineError(
            f"{export.size_bytes} bytes from {export.fd_offset} on of {len(export.pieces)} allocations "
            f"of device {export.device!r} are not where it can be",
            Code.REGION_INVALID,
        )
