"""The places of version 0.1 in a run directory, kept for one release: its locks and its worker socket.

Its lock files are open to everybody (mode 0644), and reading is enough for `flock`: any local user
could hold one, and block every start.
"""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

from kvxferd.errors import Code, ConfigError


class OldLock:
    """One lock file. `fd` changes with `replace`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = _open(path)

    def take(self) -> bool:
        """Return whether the lock is held here now; then nobody else can open its file any more."""
        if not lock(self.fd):
            return False
        with suppress(PermissionError):  # another user's, which was a daemon's here once
            os.fchmod(self.fd, 0o600)
        return True

    def is_held_by_own_user(self) -> bool:
        """Whether a process of this user, or of root, holds it, as far as this process may look."""
        status = os.fstat(self.fd)
        return any(_holds(Path("/proc", name), status) for name in os.listdir("/proc") if name.isdigit())

    def replace(self) -> None:
        """Put a file that nobody else can open in its place, and take that one."""
        self.path.unlink(missing_ok=True)
        os.close(self.fd)
        self.fd = _open(self.path)
        if not lock(self.fd):
            raise BlockingIOError(0, f"{self.path} was taken by another daemon just now")


class OldSocket:
    """Where version 0.1 had the worker socket: now a symbolic link."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._made = False

    def point_to(self, target: Path) -> None:
        """Make the link. Raises ConfigError(already-running) where a daemon answers there."""
        if is_answered(self._path):
            raise ConfigError(
                f"cannot start: another daemon answers at {self._path}; stop it", Code.ALREADY_RUNNING
            )
        if self._path.is_socket() or self._path.is_symlink():
            self._path.unlink()
        with suppress(FileExistsError):  # whatever it is, it is not this daemon's to remove
            self._path.symlink_to(target)
            self._made = True

    def remove(self) -> None:
        """Remove the link that was made here."""
        if self._made and self._path.is_symlink():
            self._path.unlink()
        self._made = False


def is_answered(path: Path) -> bool:
    """Whether somebody listens there; a dead daemon's file is left behind and refuses."""
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


def lock(fd: int) -> bool:
    """Return whether the file is locked by this descriptor now; never waits."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _holds(process: Path, file: os.stat_result) -> bool:
    with suppress(OSError):
        if process.stat().st_uid not in (0, os.geteuid()):
            return False
        for fd in (process / "fd").iterdir():
            with suppress(OSError):
                status = fd.stat()
                if (status.st_dev, status.st_ino) != (file.st_dev, file.st_ino):
                    continue
                # Only the descriptor through which it is held, and those inherited from it, show the lock.
                if "FLOCK" in (process / "fdinfo" / fd.name).read_text():
                    return True
    return False
