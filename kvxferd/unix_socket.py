"""Who is at the other end of a Unix socket, by the kernel's word, and whether it lives."""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from typing import NamedTuple

_SO_PEERPIDFD = 77  # Linux 6.5; Python has no name for it
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


class Credentials(NamedTuple):
    """Who connected, by the kernel's word."""

    pid: int
    uid: int
    gid: int


def credentials_of(accepted: socket.socket) -> Credentials:
    """Return who connected."""
    return Credentials(
        *_CREDENTIALS.unpack(accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    )


def open_exit_fds(accepted: socket.socket, pid: int) -> tuple[int, int]:
    """Return a descriptor that is readable once the worker is dead, and one that keeps it from that.

    The kernel's own pidfd of who connected is exact; a pidfd by number may be another process's
    by now, which only means that the closing socket is noticed first. Before Linux 6.5 a worker in
    another PID namespace, which is not below the daemon's, has neither: a pipe stands in, whose other
    end goes with the session. Such a session ends with its socket alone, when the last process that
    holds it closes it.

    Raises ProcessLookupError where whoever connected is dead already, OSError without descriptors.
    """
    try:
        return int.from_bytes(accepted.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4), sys.byteorder), -1
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EMFILE, errno.ENFILE):
            raise
    if pid > 0:
        return os.pidfd_open(pid), -1
    return os.pipe2(os.O_CLOEXEC)
