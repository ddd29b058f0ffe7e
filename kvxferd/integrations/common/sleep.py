"""A rank around its engine's sleep: its memory may be freed once no other process maps it."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvxferd.client import RankHandle
from kvxferd.errors import Code, KvxferdError
from kvxferd.fd_wait import wait_readable


def suspend(rank: RankHandle, handle_events: Callable[[], object], timeout_s: float) -> None:
    """Block until the daemon has unmapped the rank's memory.

    `handle_events` is called when some may be there. After an error it may be called again: a rank that was
    suspended meanwhile is not suspended twice. Raises KvxferdError (deadline).
    """
    rank.suspend()
    deadline = time.monotonic() + timeout_s
    handle_events()
    while not rank.is_suspended:
        left = deadline - time.monotonic()
        if left <= 0:
            raise KvxferdError(
                f"cannot suspend: the daemon has not let go of the memory for {timeout_s:.0f} s; "
                "it must not be freed",
                Code.DEADLINE,
            )
        wait_readable([rank.fileno()], left)
        handle_events()
