"""The process at the other end of a Unix socket: its credentials from the kernel, and its exit."""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from typing import NamedTuple

_SO_PEERPIDFD = 77  # Linux 6.5; Python does not define it
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


class Credentials(NamedTuple):
    """The process that connected, as the kernel recorded it."""

    pid: int
    uid: int
    gid: int


def credentials_of(accepted: socket.socket) -> Credentials:
    """Return the credentials of the process that connected (SO_PEERCRED)."""
    return Credentials(
        *_CREDENTIALS.unpack(accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    )


def open_exit_fds(accepted: socket.socket, pid: int) -> tuple[int, int]:
    """Return a descriptor that is readable once the worker is dead, and the pipe's writer, or -1.

    The kernel's pidfd of the process that connected is exact. A pidfd opened by number may belong to
    another process by now; then the daemon only notices the closing socket first. Before Linux 6.5 a
    worker in another PID namespace that is not below the daemon's has neither: a pipe replaces the pidfd,
    and its writer is closed with the session. Such a session ends only when the last process that holds
    its socket closes it.

    Raises ProcessLookupError if the process is already dead, OSError without free descriptors.
    """
    try:
        return int.from_bytes(accepted.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4), sys.byteorder), -1
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.EMFILE, errno.ENFILE):
            raise
    if pid > 0:
        return os.pidfd_open(pid), -1
    return os.pipe2(os.O_CLOEXEC)
