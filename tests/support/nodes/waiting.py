"""Waiting for what a test expects."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

FIRST_POLL_S, POLL_S = 0.002, 0.02


def comes_true(holds: Callable[[], Any], limit_s: float) -> bool:
    """Return whether `holds()` is true, now or within the limit, as soon as it is."""
    deadline = time.monotonic() + limit_s
    pause_s = FIRST_POLL_S
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S)
    return True


def wait_until(holds: Callable[[], Any], what: Callable[[], str] | str, limit_s: float = 30.0) -> None:
    """Return once `holds()` is true; fail with `what` if it never is."""
    if not comes_true(holds, limit_s):
        raise AssertionError(f"not within {limit_s} s: {what if isinstance(what, str) else what()}")
