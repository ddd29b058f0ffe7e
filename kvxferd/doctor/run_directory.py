"""The run directory, which holds sockets and locks."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from kvxferd.doctor.finding import CheckContext, Finding, fail, ok, warn


def check(node: CheckContext) -> Iterator[Finding]:
    """Check whether this user can run a daemon there, and who may use the sockets."""
    path = Path(node.config.node.run_dir)
    if not _exists(path):
        yield from _absent(path)
        return
    if not os.access(path, os.W_OK | os.X_OK):
        yield warn(
            "run directory",
            f"{path} cannot be written by uid {os.geteuid()}",
            "run the daemon as the directory's owner, or set node.run_dir to one of this user's",
        )
    else:
        yield ok("run directory", f"{path}, {_owner(path)}")
    for name, socket in (("worker", node.config.worker.socket), ("control", node.config.control.socket)):
        if _exists(Path(socket)):
            yield ok(f"{name} socket", f"{socket}, {_owner(Path(socket))}")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:
        return False


def _absent(path: Path) -> Iterator[Finding]:
    parent = next((p for p in path.parents if _exists(p)), Path("/"))
    if os.access(parent, os.W_OK | os.X_OK):
        yield ok("run directory", f"{path} is not there; a daemon of this user makes it")
    else:
        yield fail(
            "run directory",
            f"{path} is not there, and uid {os.geteuid()} cannot make it in {parent}",
            "make it, owned by the daemon's user (RuntimeDirectory= in the unit), or set node.run_dir",
        )


def _owner(path: Path) -> str:
    status = path.stat()
    return f"{stat.filemode(status.st_mode)} of uid {status.st_uid}, gid {status.st_gid}"
