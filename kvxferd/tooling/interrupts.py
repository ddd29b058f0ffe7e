"""Signals that end a tool."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interrupted_once() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt inside the block, as Ctrl-C does. On the main thread.

    Only the first signal counts: a second one (`timeout` sends two) would interrupt the clean-up, which
    ends by itself.
    """
    before = {number: signal.signal(number, _on_signal) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _on_signal(number: int, frame: FrameType | None) -> None:
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt
