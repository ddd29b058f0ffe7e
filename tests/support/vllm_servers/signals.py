"""Processes that do nothing for a while."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress


@contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """The processes do nothing inside the block; those that were killed in it stay dead."""
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
