"""Where UCX makes its shared memory files, so that a killed mover cannot leave one behind.

UCX unlinks each file right after opening it; a process killed in between leaves 4 MiB in /dev/shm
that nobody can attribute to anyone. So the movers of one parent get a directory of their own,
named by the parent's pid; the parent removes it, or else the daemon when the parent is gone.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_SHM = Path("/dev/shm")
_VARIABLE = "UCX_POSIX_DIR"


def make_directory() -> None:
    """Make this process's directory and name it in the environment, unless the operator named another."""
    directory = _directory(os.getpid())
    if _VARIABLE in os.environ:
        return
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError:  # no /dev/shm here, or not ours: UCX finds its own way
        return
    os.environ[_VARIABLE] = str(directory)


def remove_directory(pid: int) -> None:
    """Remove the directory of a parent that has no movers any more. Idempotent."""
    shutil.rmtree(_directory(pid), ignore_errors=True)


def _directory(pid: int) -> Path:
    return _SHM / f"kvxferd-movers-{pid}"
