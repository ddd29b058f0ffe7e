"""The run directory: its owner and mode, its locks, and the directory of the worker socket.

A directory has one daemon, which starts only once its predecessor's movers have exited.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import stat
from pathlib import Path

import structlog

from kvxferd.errors import Code, ConfigError
from kvxferd.unix_socket import is_own_uid

log = structlog.get_logger()

LOCK_POLL_S = 0.02
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
WORKER_DIRECTORY = "worker"  # pods mount this one, without the locks and control.sock


class RunDirectory:
    """Holds the locks while open, in `private/`, which no other user may enter.

    Another user who can open a lock file can take the lock: reading is enough for `flock`.
    The daemon alone holds `daemon.lock`. Every mover inherits `movers.lock`: the kernel releases it when
    the last of them exits, in whatever way.
    """

    def __init__(self, path: Path, worker_socket: str = "") -> None:
        """Create the directory and acquire the daemon's lock. Raises ConfigError(already-running)."""
        self._path = path
        private = path / "private"
        self.ownership_path = private / "owners.json"  # which user owns each engine id
        self._lock_fds: list[int] = []
        try:
            path.mkdir(mode=0o755, parents=True, exist_ok=True)
            _check_owner(path, "node.run_dir")
            _make_directory(private, 0o700)
            self._daemon_fd = self._open_lock(private / "daemon.lock")
            self._movers_fd = self._open_lock(private / "movers.lock")
            if not try_lock(self._daemon_fd):
                raise self._already_running_error()
            if worker_socket == str(path / WORKER_DIRECTORY / "worker.sock"):
                _make_directory(path / WORKER_DIRECTORY, 0o755)
            os.ftruncate(self._daemon_fd, 0)
            os.pwrite(self._daemon_fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            self.close()
            raise ConfigError(_describe_os_error(path, error)) from error
        except BaseException:
            self.close()
            raise

    def _open_lock(self, path: Path) -> int:
        fd = os.open(path, _LOCK_FLAGS, 0o600)
        self._lock_fds.append(fd)
        return fd

    def _already_running_error(self) -> ConfigError:
        holder = os.pread(self._daemon_fd, 64, 0).decode(errors="replace").strip() or "unknown"
        return ConfigError(
            f"cannot start on {self._path}: another kvxferd, pid {holder}, holds its sockets; "
            "stop it, or give this one another node.run_dir",
            Code.ALREADY_RUNNING,
        )

    @property
    def mover_lock_fds(self) -> tuple[int, ...]:
        """The locks that every mover inherits."""
        return (self._movers_fd,)

    async def wait_for_movers(self, limit_s: float, stopping: asyncio.Event | None = None) -> None:
        """Return once no mover of an earlier daemon is left. Raises ConfigError(already-running).

        Return early once `stopping` is set.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        while not try_lock(self._movers_fd):
            if stopping is not None and stopping.is_set():
                return
            if loop.time() > deadline:
                raise ConfigError(
                    f"cannot start on {self._path}: movers of an earlier daemon still run; "
                    f"`fuser {self._path / 'private' / 'movers.lock'}` names them: kill them",
                    Code.ALREADY_RUNNING,
                )
            await asyncio.sleep(LOCK_POLL_S)

    def close(self) -> None:
        """Release the locks. Movers that still run keep theirs."""
        while self._lock_fds:
            os.close(self._lock_fds.pop())


def try_lock(fd: int) -> bool:
    """Return whether this descriptor now holds the file's lock; never waits."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _describe_os_error(path: Path, error: OSError) -> str:
    """Return what is wrong with the directory, and what to do about it."""
    match error.errno:
        case errno.EACCES | errno.EPERM:
            todo = (
                f"uid {os.geteuid()} may not write there: make it as root with "
                f"`install -d -o {os.geteuid()} {path}`, or name a directory of this user's"
            )
        case errno.ENOSPC | errno.EDQUOT:
            todo = "make room there"
        case errno.EROFS:
            todo = "name one that can be written, such as a tmpfs"
        case errno.ENOTDIR | errno.EEXIST:
            todo = "a part of the path is no directory: remove that, or name another"
        case errno.ELOOP:
            todo = "there must be no symbolic link: remove it"
        case _:
            todo = "name another directory"
    at = f" ({error.filename})" if error.filename not in (None, str(path), path) else ""
    return f"cannot use node.run_dir = {path}: {error.strerror}{at}; {todo}"


def _check_owner(path: Path, setting: str) -> None:
    """Raise ConfigError if another user could replace what is in the directory."""
    what = f"cannot use {setting} = {path}"
    if path.is_symlink() and not is_own_uid(path.lstat().st_uid):
        raise ConfigError(f"{what}: it is a symbolic link of uid {path.lstat().st_uid}; remove it")
    status = path.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{what}: it is no directory; remove it, or name another")
    if not is_own_uid(status.st_uid):
        raise ConfigError(
            f"{what}: it belongs to uid {status.st_uid}; remove it, or run the daemon as that user"
        )
    # A user who may write there may rename `private/`, unlink the locks and bind sockets.
    if (mode := stat.S_IMODE(status.st_mode)) & _OTHERS_WRITE:
        whom = "anybody" if mode & stat.S_IWOTH else f"group {status.st_gid}"
        if status.st_uid != os.geteuid():
            raise ConfigError(f"{what}: {whom} may write there; chmod go-w {path}, or name a directory below")
        log.warning("run directory permissions restricted", path=str(path), whom=whom)
        path.chmod(mode & ~_OTHERS_WRITE)


def _make_directory(path: Path, mode: int) -> None:
    """Create a directory of this user with that mode, whatever the umask. Raises ConfigError, OSError."""
    path.mkdir(mode=mode, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or not is_own_uid(status.st_uid):
        raise ConfigError(f"cannot use {path}: it is no directory of uid {os.geteuid()}; remove it")
    if status.st_uid == os.geteuid():
        path.chmod(mode)
