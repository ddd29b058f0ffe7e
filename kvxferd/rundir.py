"""The run directory's locks: one daemon per directory, and none before its predecessor's movers are gone."""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path

from kvxferd.errors import Code, ConfigError

POLL_S = 0.02


class RunDirectory:
    """Holds two locks while open.

    `daemon.lock` is the daemon's own. `movers.lock` is inherited by every mover: the kernel lets
    go of it with the last of them, however they ended.
    """

    def __init__(self, path: Path) -> None:
        """Make the directory and take the daemon's lock. Raises ConfigError(already-running)."""
        try:
            path.mkdir(mode=0o755, parents=True, exist_ok=True)
            (path / "private").mkdir(mode=0o700, exist_ok=True)
            self._daemon_fd = os.open(path / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self.movers_fd = os.open(path / "movers.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"cannot use node.run_dir = {path}: {error.strerror}") from error
        if not _lock(self._daemon_fd):
            holder = os.pread(self._daemon_fd, 64, 0).decode(errors="replace").strip() or "unknown"
            self.close()
            raise ConfigError(
                f"cannot start on {path}: another kvxferd, pid {holder}, holds its sockets; "
                "stop it, or give this one another node.run_dir",
                Code.ALREADY_RUNNING,
            )
        os.ftruncate(self._daemon_fd, 0)
        os.pwrite(self._daemon_fd, f"{os.getpid()}\n".encode(), 0)
        self._path = path
        self.owners = path / "private" / "owners.json"  # whose engine ids are

    async def wait_for_movers(self, limit_s: float) -> None:
        """Return once no mover of an earlier daemon is left. Raises ConfigError(already-running)."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        while not _lock(self.movers_fd):
            if loop.time() > deadline:
                raise ConfigError(
                    f"cannot start on {self._path}: movers of an earlier daemon still run; "
                    f"`fuser {self._path / 'movers.lock'}` names them: kill them",
                    Code.ALREADY_RUNNING,
                )
            await asyncio.sleep(POLL_S)

    def close(self) -> None:
        """Let go of the locks. Movers that still run keep theirs."""
        os.close(self._daemon_fd)
        os.close(self.movers_fd)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
