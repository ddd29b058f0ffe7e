"""Signals that end a tool."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Interrupt:
    """The signal that ends this process's tool."""

    def __init__(self) -> None:
        self._is_held = False
        self._is_due = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt, now or at the end of `held`."""
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        if not self._is_held:
            raise KeyboardInterrupt
        self._is_due = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raise nothing before the end of the block, which may not be in another one."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._is_due:
            self._is_due = False
            raise KeyboardInterrupt


_interrupt = _Interrupt()


@contextmanager
def interrupted_once() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt inside the block, as Ctrl-C does. On the main thread.

    Only the first signal counts: a second one (`timeout` sends two) would interrupt the clean-up, which
    ends by itself.
    """
    before = {number: signal.signal(number, _interrupt.on_signal) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def uninterrupted() -> AbstractContextManager[None]:
    """A signal that comes inside this block raises KeyboardInterrupt at its end, not in the middle.

    So what is started in the block has an owner when the exception comes. The owner is made before it.
    """
    return _interrupt.held()
