"""The locks and the worker socket of version 0.1 in a run directory, kept for one release.

Every user can open its lock files (mode 0644), and reading is enough for `flock`: any local user
could hold one and block every start.
"""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

from kvxferd.errors import Code, ConfigError

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class OldLock:
    """One lock file of version 0.1. `fd` changes with `acquire` and `replace`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, _FLAGS, 0o600)
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
        fd = os.open(fresh, _FLAGS | os.O_EXCL, 0o600)
        try:
            try_lock(fd)
            fresh.replace(self.path)
        except BaseException:
            os.close(fd)
            raise
        return fd


class OldSocketLink:
    """The symbolic link at version 0.1's path of the worker socket."""

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


def is_listening(path: Path) -> bool:
    """Whether a process listens at the path. A dead daemon leaves its file, which refuses connections."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fspath(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except BlockingIOError:
            return True  # its backlog is full
        except OSError as error:
            if error.errno is None:
                return False  # longer than any socket's path
            raise
        return True


def try_lock(fd: int) -> bool:
    """Return whether this descriptor now holds the file's lock; never waits."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holds_lock(process: Path, file: os.stat_result) -> bool:
    with suppress(OSError):
        if not _uids_of(process) <= {0, os.geteuid()}:
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
