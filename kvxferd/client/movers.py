"""Watching movers die: a mover's pidfd is readable once the process can write nothing any more."""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable


class MoverWatch:
    """The movers of each connection. Belongs to the I/O thread; owns the pidfds."""

    def __init__(self, selector: selectors.BaseSelector, on_quiet: Callable[[int], None]) -> None:
        self._selector = selector
        self._on_quiet = on_quiet  # called with an epoch that has ended and whose movers are all dead
        self._alive: dict[int, set[int]] = {}  # epoch -> pidfds
        self._ended: set[int] = set()

    def watch(self, epoch: int, pidfd: int) -> None:
        """Take a mover's pidfd, of a connection that lives. Raises OSError on what cannot be polled."""
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._died(epoch, pidfd))
        self._alive.setdefault(epoch, set()).add(pidfd)

    def end(self, epoch: int) -> None:
        """The connection has ended: no mover of it is unknown."""
        self._ended.add(epoch)
        self._judge(epoch)

    def close(self) -> None:
        """Watch no more."""
        for pidfds in self._alive.values():
            for pidfd in pidfds:
                self._forget(pidfd)
        self._alive.clear()

    def _died(self, epoch: int, pidfd: int) -> None:
        self._alive[epoch].discard(pidfd)
        self._forget(pidfd)
        self._judge(epoch)

    def _judge(self, epoch: int) -> None:
        if epoch in self._ended and not self._alive.get(epoch):
            self._alive.pop(epoch, None)
            self._ended.discard(epoch)
            self._on_quiet(epoch)

    def _forget(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
