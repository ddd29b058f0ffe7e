"""The process at the other end of a Unix socket: its credentials, its exit, and whether it listens."""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from pathlib import Path
from typing import NamedTuple

_SO_PEERPIDFD = 77  # Linux 6.5; Python does not define it
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


class Credentials(NamedTuple):
    """The process that connected, as the kernel recorded it."""

    pid: int
    uid: int
    gid: int


def is_own_uid(uid: int | None) -> bool:
    """Whether the uid is root's or that of this process: operators, whose files the daemon trusts too."""
    return uid in (0, os.geteuid())


def credentials_of(accepted: socket.socket) -> Credentials:
    """Return the credentials of the process that connected (SO_PEERCRED)."""
    return Credentials(
        *_CREDENTIALS.unpack(accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    )


def is_listening(path: Path) -> bool:
    """Whether a process listens at the path. A dead daemon leaves its file, which refuses connections."""
    try:
        return listening_pid(path) is not None
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno is None:
            return False  # longer than any socket's path
        raise


def listening_pid(path: Path) -> int | None:
    """Return the pid of the process that listens at the path; None if none does, 0 if the pid is unknown."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return None
        except BlockingIOError:  # its backlog is full
            return 0
        return credentials_of(probe).pid


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
