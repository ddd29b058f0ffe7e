"""Is a descriptor safe to map?"""

from __future__ import annotations

import fcntl
import os
import stat

from kvxferd.errors import Code, EngineError

_WRITE_SEALS = fcntl.F_SEAL_WRITE | getattr(fcntl, "F_SEAL_FUTURE_WRITE", 0x10)


def check_memfd(fd: int, needed_bytes: int) -> None:
    """Return if the descriptor is a writable memfd that cannot shrink and holds `needed_bytes`.

    Raises EngineError: region-invalid (not a memfd, or not writable), region-unsealed (its owner
    could shrink it, and whoever maps it would die by SIGBUS), region-too-small.
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
