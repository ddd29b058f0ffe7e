"""Linux calls for a mover's process: end with others, wake in time, and hold no descriptor too many."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import threading
from collections.abc import Iterable

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_NAME = 15
_PR_SET_TIMERSLACK = 29
_TIMER_SLACK_NS = 5_000  # the default of 50 us is longer than the shortest pauses of the poll loop


def prepare_thread(name: str) -> None:
    """Name the calling thread for `ps` and let its sleeps be short."""
    _LIBC.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
    _LIBC.prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS, 0, 0, 0)


def close_all_but(keep: Iterable[int]) -> None:
    """Close every descriptor of this process except these."""
    kept = set(keep)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the descriptor of this listing is closed already
                os.close(int(name))


def exit_when(fd: int, events: int, why: str) -> None:
    """End this process, from a thread, once poll reports `events` (or a hang-up) on the descriptor.

    The main thread may be inside a copy of a second at that time: this does not wait for it.
    """

    def watch() -> None:
        poller = select.poll()
        poller.register(fd, events)
        while not poller.poll():
            pass
        os._exit(0)

    threading.Thread(target=watch, name=why, daemon=True).start()
