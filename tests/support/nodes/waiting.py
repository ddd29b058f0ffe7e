"""Waiting for what a test expects."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

POLL_S = 0.02


def wait_until(holds: Callable[[], Any], what: Callable[[], str] | str, limit_s: float = 30.0) -> None:
    """Return once `holds()` is true; fail with `what` if it never is."""
    deadline = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s} s: {what if isinstance(what, str) else what()}")
        time.sleep(POLL_S)
