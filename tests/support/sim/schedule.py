"""Virtual time: the order in which a simulation's acts happen."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Protocol

Act = Callable[..., object]


class Later(Protocol):
    """What a node needs of time: acts at a time, and acts after a delay, both in seconds."""

    def at(self, when: float, act: Act, *arguments: Any) -> None:
        """Call `act` at that time."""

    def after(self, delay_s: float, act: Act, *arguments: Any) -> None:
        """Call `act` after so many seconds."""


class Schedule:
    """Acts by their time, and those of one time in the order in which they were scheduled."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._heap: list[tuple[float, int, Act, tuple[Any, ...]]] = []
        self._order = 0

    def at(self, when: float, act: Act, *arguments: Any) -> None:
        """Call `act` at that time."""
        self._order += 1
        heapq.heappush(self._heap, (max(when, self.now), self._order, act, arguments))

    def after(self, delay_s: float, act: Act, *arguments: Any) -> None:
        """Call `act` after so many seconds."""
        self.at(self.now + delay_s, act, *arguments)

    def run_next(self, until: float) -> bool:
        """Let time pass to the next act and call it. Return False where none is due by `until`."""
        if not self._heap or self._heap[0][0] > until:
            return False
        when, _, act, arguments = heapq.heappop(self._heap)
        self.now = max(self.now, when)
        act(*arguments)
        return True

    def run(self, until: float) -> None:
        """Call all that is due by `until`, and let time pass until then."""
        while self.run_next(until):
            pass
        self.now = max(self.now, until)
