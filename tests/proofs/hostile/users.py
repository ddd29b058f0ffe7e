"""The users of a stage. Numbers that nobody has: no account is made."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

PR_SET_PDEATHSIG = 1
GROUP = 61_000  # of the worker socket


@dataclass(frozen=True)
class User:
    uid: int
    gid: int

    def become(self) -> None:
        """Be that user from here on."""
        os.setgroups([])
        os.setresgid(self.gid, self.gid, self.gid)
        os.setresuid(self.uid, self.uid, self.uid)


DAEMON = User(61_001, GROUP)
ENGINES = User(61_002, GROUP)
HOSTILE = User(61_003, GROUP)
STRANGER = User(61_004, 61_004)
ROOT = User(0, 0)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel end this process with the one that started it. A change of user takes that back."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


@cache
def can_start(environ: tuple[tuple[str, str], ...]) -> bool:
    """Whether the daemon's user can start this program where it lies; else the daemons are root's."""
    probe = [
        sys.executable,
        "-c",
        "import tests.proofs.hostile.watched_daemon, kvxferd.daemon, kvxferd.mover.process.forkserver",
    ]
    user: dict[str, Any] = {"user": DAEMON.uid, "group": DAEMON.gid, "extra_groups": []}
    try:
        done = subprocess.run(probe, env=dict(environ), stderr=subprocess.DEVNULL, check=False, **user)
    except PermissionError:
        return False
    return done.returncode == 0
