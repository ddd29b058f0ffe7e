"""The run directory: its owner and mode, its locks, and the directory of the worker socket.

A directory has one daemon, which starts only once its predecessor's movers have exited.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path

import structlog

from kvxferd.errors import Code, ConfigError
from kvxferd.unix_socket import is_listening, is_own_uid

log = structlog.get_logger()

LOCK_POLL_S = 0.02
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
WORKER_DIRECTORY = "worker"  # pods mount this one, without the locks and control.sock


class RunDirectory:
    """Holds the locks while open, in `private/`, which no other user may enter.

    Another user who can open a lock file can take the lock: reading is enough for `flock`.
    The daemon alone holds `daemon.lock`. Every mover inherits `movers.lock`: the kernel releases it when
    the last of them exits, in whatever way. The locks that versions before 0.1.0 have beside `private/`
    are taken too, so that daemons and movers of both versions never run at the same time.
    """

    def __init__(self, path: Path, worker_socket: str = "") -> None:
        """Create the directory and acquire the daemon's lock. Raises ConfigError(already-running)."""
        self._path = path
        private = path / "private"
        self.ownership_path = private / "owners.json"  # which user owns each engine id
        self._old_socket = OldSocketLink(path / "worker.sock")
        self._lock_fds: list[int] = []
        self._old_locks: list[OldLock] = []
        try:
            path.mkdir(mode=0o755, parents=True, exist_ok=True)
            _check_owner(path, "node.run_dir")
            _make_directory(private, 0o700)
            self._daemon_fd = self._open_lock(private / "daemon.lock")
            self._movers_fd = self._open_lock(private / "movers.lock")
        except OSError as error:
            self.close()
            raise ConfigError(_describe_os_error(path, error)) from error
        except BaseException:
            self.close()
            raise
        if not try_lock(self._daemon_fd):
            raise self._already_running_error(self._daemon_fd)
        try:
            self._take_over_v0_1(worker_socket)
            for fd in (self._daemon_fd, self._old_daemon.fd):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            self.close()
            raise ConfigError(_describe_os_error(path, error)) from error
        except BaseException:
            self.close()
            raise

    def _take_over_v0_1(self, worker_socket: str) -> None:
        """Acquire the locks of versions before 0.1.0, and create the worker socket's directory."""
        path = self._path
        self._old_daemon = OldLock(path / "daemon.lock")
        self._old_locks.append(self._old_daemon)
        if not self._old_daemon.acquire():
            sockets = (path / "worker.sock", path / "control.sock")
            if self._old_daemon.is_held_by_own_user() or any(map(is_listening, sockets)):
                raise self._already_running_error(self._old_daemon.fd)
            self._replace_old_lock(self._old_daemon)
        self._old_movers = OldLock(path / "movers.lock")
        self._old_locks.append(self._old_movers)
        link_to = Path(WORKER_DIRECTORY) / "worker.sock"
        if worker_socket == str(path / link_to):
            _make_directory(path / WORKER_DIRECTORY, 0o755)
            self._old_socket.point_to(link_to)
        else:
            self._old_socket.remove_stale(link_to)

    def _open_lock(self, path: Path) -> int:
        fd = os.open(path, _LOCK_FLAGS, 0o600)
        self._lock_fds.append(fd)
        return fd

    def _replace_old_lock(self, old: OldLock) -> None:
        log.warning("old lock replaced", path=str(old.path))
        old.replace()

    def _already_running_error(self, lock_fd: int) -> ConfigError:
        holder = os.pread(lock_fd, 64, 0).decode(errors="replace").strip() or "unknown"
        self.close()
        return ConfigError(
            f"cannot start on {self._path}: another kvxferd, pid {holder}, holds its sockets; "
            "stop it, or give this one another node.run_dir",
            Code.ALREADY_RUNNING,
        )

    @property
    def mover_lock_fds(self) -> tuple[int, ...]:
        """The locks that every mover inherits. Valid after `wait_for_movers`."""
        return (self._movers_fd, self._old_movers.fd)

    async def wait_for_movers(self, limit_s: float, stopping: asyncio.Event | None = None) -> None:
        """Return once no mover of an earlier daemon is left. Raises ConfigError(already-running).

        Return early once `stopping` is set.

        If the old lock's holder is not a process of this user, wait for `limit_s` too: it may be a mover in
        another PID namespace. After that, replace that lock by one that no other user can open.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        while not try_lock(self._movers_fd):
            if stopping is not None and stopping.is_set():
                return
            if loop.time() > deadline:
                raise self._movers_running_error(self._path / "private" / "movers.lock")
            await asyncio.sleep(LOCK_POLL_S)
        while not self._old_movers.acquire():
            if stopping is not None and stopping.is_set():
                return
            if loop.time() > deadline:
                if self._old_movers.is_held_by_own_user():
                    raise self._movers_running_error(self._old_movers.path)
                self._replace_old_lock(self._old_movers)
                return
            await asyncio.sleep(LOCK_POLL_S)

    def _movers_running_error(self, path: Path) -> ConfigError:
        return ConfigError(
            f"cannot start on {self._path}: movers of an earlier daemon still run; "
            f"`fuser {path}` names them: kill them",
            Code.ALREADY_RUNNING,
        )

    def close(self) -> None:
        """Release the locks, and remove the old socket's link. Movers that still run keep their locks."""
        self._old_socket.remove()
        while self._old_locks:
            self._old_locks.pop().close()
        while self._lock_fds:
            os.close(self._lock_fds.pop())


# Versions before 0.1.0 kept locks and worker socket beside `private/`; both are supported for one release.
# Their lock files can be opened by every user (mode 0644), and reading is enough for `flock`: any local user
# could hold one and block every start.


class OldLock:
    """One lock file of versions before 0.1.0. `fd` changes with `acquire` and `replace`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, _LOCK_FLAGS, 0o600)
        self._former_fd = -1

    def acquire(self) -> bool:
        """Return whether the lock was acquired; then no other user can open its file any more.

        The lock is then on a new file: a process that has the old one open cannot lock the file that the
        next start opens.
        """
        if not try_lock(self.fd):
            return False
        try:
            # Hold both: an older daemon may have opened the old file and not locked it yet.
            self.fd, self._former_fd = self._install_new_file(), self.fd
        except PermissionError:  # root's directory, where a daemon of another user creates no files
            with suppress(PermissionError):
                os.fchmod(self.fd, 0o600)
        return True

    def is_held_by_own_user(self) -> bool:
        """Whether a process of this user or of root holds the lock, as far as /proc shows it."""
        status = os.fstat(self.fd)
        return any(_holds_lock(Path("/proc", name), status) for name in os.listdir("/proc") if name.isdigit())

    def replace(self) -> None:
        """Replace the file by one that no other user can open, and hold that lock."""
        former, self.fd = self.fd, self._install_new_file()
        os.close(former)

    def close(self) -> None:
        """Release the lock. Movers that inherited it keep it."""
        for fd in {self.fd, self._former_fd} - {-1}:
            os.close(fd)
        self.fd = self._former_fd = -1

    def _install_new_file(self) -> int:
        """Create a file, lock it, then rename it: a process that opens the path always finds it locked."""
        fresh = self.path.with_name(f"{self.path.name}.new")
        fresh.unlink(missing_ok=True)
        fd = os.open(fresh, _LOCK_FLAGS | os.O_EXCL, 0o600)
        try:
            try_lock(fd)
            fresh.replace(self.path)
        except BaseException:
            os.close(fd)
            raise
        return fd


class OldSocketLink:
    """The symbolic link at the path that versions before 0.1.0 have of the worker socket."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_made_here = False

    def point_to(self, target: Path) -> None:
        """Create the link. Raises ConfigError(already-running) if a daemon listens at its path."""
        if is_listening(self._path):
            raise ConfigError(
                f"cannot start: another daemon answers at {self._path}; stop it", Code.ALREADY_RUNNING
            )
        if self._path.is_socket() or self._path.is_symlink():
            self._path.unlink()
        with suppress(FileExistsError):  # another program's file: leave it
            self._path.symlink_to(target)
            self._is_made_here = True

    def remove_stale(self, target: Path) -> None:
        """Remove the link that a killed daemon left, if the socket now has another path."""
        if self._path.is_symlink() and self._path.readlink() == target and not is_listening(self._path):
            self._path.unlink()

    def remove(self) -> None:
        """Remove the link if this object created it."""
        if self._is_made_here and self._path.is_symlink():
            self._path.unlink()
        self._is_made_here = False


def try_lock(fd: int) -> bool:
    """Return whether this descriptor now holds the file's lock; never waits."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holds_lock(process: Path, file: os.stat_result) -> bool:
    with suppress(OSError):
        if not all(map(is_own_uid, _uids_of(process))):
            return False
        for fd in (process / "fd").iterdir():
            with suppress(OSError):
                status = fd.stat()
                if (status.st_dev, status.st_ino) != (file.st_dev, file.st_ino):
                    continue
                # Only the descriptor that acquired the lock, and its inherited copies, show it.
                if "FLOCK" in (process / "fdinfo" / fd.name).read_text():
                    return True
    return False


def _uids_of(process: Path) -> set[int]:
    """Return the real, effective, saved and file system uids: a set-uid program has its caller's as real."""
    lines = (process / "status").read_text().splitlines()
    return {int(uid) for line in lines if line.startswith("Uid:") for uid in line.split()[1:]}


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
