"""Where UCX makes its shared memory files, so that a killed mover cannot leave one behind.

UCX unlinks each file right after opening it; a process killed in between leaves 4 MiB in /dev/shm that
cannot be attributed to anyone. So the movers of one forkserver get a directory of their own, named by
the forkserver's pid. The forkserver removes what a dead mover left in it, and at last all of it; where
it was killed, the daemon does; where both were killed at once, the next forkserver on this machine does.
A forkserver holds a lock on its directory as long as it lives: pids prove nothing where several PID
namespaces share /dev/shm.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_SHM = Path("/dev/shm")
_VARIABLE = "UCX_POSIX_DIR"


def make_shm_directory() -> None:
    """Make this process's directory and name it in the environment, unless the operator named another."""
    if _VARIABLE in os.environ:
        return
    directory = _directory(os.getpid())
    try:
        _remove_abandoned()
        remove_shm_directory(os.getpid())  # an earlier process of this pid may have left one
        # Locked before it has its name, so that no other forkserver takes it for an abandoned one.
        unnamed = directory.with_name(f".{directory.name}")
        unnamed.mkdir(mode=0o700, exist_ok=True)
        _lock(unnamed)  # until this process ends
        unnamed.rename(directory)
    except OSError:  # no /dev/shm here, or not writable: UCX chooses a place itself
        return
    os.environ[_VARIABLE] = str(directory)


def remove_shm_directory(pid: int) -> None:
    """Remove the directory of a forkserver that has no movers any more. Idempotent."""
    shutil.rmtree(_directory(pid), ignore_errors=True)


def remove_left_files(movers: Collection[int]) -> None:
    """Remove what dead movers left in this process's directory: files that none of these has open."""
    for path in _directory(os.getpid()).glob("*"):
        with suppress(OSError):  # UCX has unlinked it meanwhile
            left = path.stat()
            if not any(_has_open(pid, left) for pid in movers):
                path.unlink()


def _has_open(pid: int, file: os.stat_result) -> bool:
    """Whether a process has the file open. One whose descriptors cannot be listed may have it."""
    try:
        fds = os.listdir(f"/proc/{pid}/fd")
    except FileNotFoundError:  # it has ended
        return False
    except OSError:
        return True
    for fd in fds:
        with suppress(OSError):  # closed meanwhile
            if os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), file):
                return True
    return False


def _remove_abandoned() -> None:
    for directory in _SHM.glob("kvxferd-movers-*"):
        try:
            lock = _lock(directory)
        except OSError:  # its forkserver lives, or it is another user's, or was just removed
            continue
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _lock(directory: Path) -> int:
    """Return a descriptor that holds the directory's lock. Raises OSError where another process holds it."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _directory(pid: int) -> Path:
    return _SHM / f"kvxferd-movers-{pid}"
