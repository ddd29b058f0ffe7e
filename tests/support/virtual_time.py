"""An event loop whose time passes as soon as it would wait: tests of timers take no time."""

from __future__ import annotations

import asyncio
import selectors


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop that never waits, also not for descriptors: for code that has timers alone."""

    def __init__(self) -> None:
        self.now = 1000.5  # seconds
        super().__init__(_Leaping(self))

    def time(self) -> float:
        return self.now


class _Leaping(selectors.SelectSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready, and let the time pass that the loop would have waited."""
        self._loop.now += timeout or 0.0
        return super().select(0)
