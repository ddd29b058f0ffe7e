"""The users of a stage. Numbers that nobody has: no account is made."""

from __future__ import annotations

import os
from typing import NamedTuple

GROUP = 61_000  # of the worker socket


class User(NamedTuple):
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
