"""Waits until file descriptors are readable or writable.

`select.select` refuses descriptors above 1,023, and an engine has many files open. `select.poll` counts
in milliseconds, and a mover pauses for 50 us.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import select
from collections.abc import Iterable

_LIBC = ctypes.CDLL(None, use_errno=True)


class _PollFd(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_LIBC.ppoll.restype = ctypes.c_int
_LIBC.ppoll.argtypes = [
    ctypes.POINTER(_PollFd),
    ctypes.c_ulong,
    ctypes.POINTER(_TimeSpec),
    ctypes.c_void_p,
]


class PreciseWait:
    """Waits for one descriptor with microsecond precision, by `ppoll`, which Python does not expose."""

    def __init__(self, fd: int) -> None:
        self._pollfd = _PollFd(fd, 0, 0)
        self._timeout = _TimeSpec()

    def wait(self, timeout_s: float | None, *, writable: bool = False) -> bool:
        """Return whether the descriptor is readable or at its end. `writable`: also wait for room to write.

        May return False early.
        """
        entry, limit = self._pollfd, None
        entry.events = select.POLLIN | (select.POLLOUT if writable else 0)
        if timeout_s is not None:
            whole = int(timeout_s)
            self._timeout.seconds, self._timeout.nanoseconds = whole, int((timeout_s - whole) * 1e9)
            limit = ctypes.byref(self._timeout)
        if _LIBC.ppoll(ctypes.byref(entry), 1, limit, None) < 0:
            number = ctypes.get_errno()
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number))
            return False
        return bool(entry.revents & ~select.POLLOUT)


def wait_readable(fds: Iterable[int], timeout_s: float | None = None) -> list[int]:
    """Return the descriptors that are readable or at their end; an empty list after `timeout_s`."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return [fd for fd, _ in poller.poll(_milliseconds(timeout_s))]


def wait_writable(fd: int, timeout_s: float | None = None) -> bool:
    """Return whether the descriptor becomes writable, or ends, within `timeout_s`."""
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    return bool(poller.poll(_milliseconds(timeout_s)))


def _milliseconds(timeout_s: float | None) -> int | None:
    return None if timeout_s is None else math.ceil(max(timeout_s, 0.0) * 1000)
