"""The users of a stage. Numbers that nobody has: no account is made."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.support.repository import ROOT as ROOT_DIRECTORY

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


@cache
def can_start() -> bool:
    """Whether the daemon's user can start this program where it lies; else the daemons are root's."""
    modules = "tests.proofs.hostile.watched_daemon, kvxferd.mover.process.forkserver"
    user: dict[str, Any] = {"user": DAEMON.uid, "group": DAEMON.gid, "extra_groups": []}
    environ = os.environ | {"PYTHONPATH": str(ROOT_DIRECTORY)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {modules}"], env=environ, stderr=subprocess.DEVNULL, check=False,
            **user,
        )  # fmt: skip
    except PermissionError:
        return False
    return done.returncode == 0
