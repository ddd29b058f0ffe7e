"""Unix sockets of the daemon, and the process at the other end: its credentials, its exit."""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from kvxferd.errors import Code, ConfigError

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


def bind_unix_socket(path: Path, mode: int, setting: str) -> socket.socket:
    """Return a socket bound to the path, whose file has that mode; a dead daemon's file is replaced.

    No client can connect before it listens, which is left to the caller. Raises ConfigError, which names the
    setting, also where another daemon listens there.
    """
    what = f"cannot listen on {setting} = {str(path)!r}"
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    with ExitStack() as closing:
        closing.callback(bound.close)
        try:
            if path.exists():
                if not path.is_socket():
                    raise ConfigError(f"{what}: it is there and is no socket; remove it")
                if (holder := listening_pid(path)) is not None:
                    raise ConfigError(
                        f"{what}: another daemon does, process {holder}; give this one another {setting}",
                        Code.ALREADY_RUNNING,
                    )
                path.unlink()
            bound.bind(os.fspath(path))
            path.chmod(mode)
        except OSError as error:
            raise ConfigError(f"{what}: {error.strerror or error}") from error
        closing.pop_all()
    return bound


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
