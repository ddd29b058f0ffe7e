"""Named timers in virtual time: the core has no clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable


class Timers:
    """Named points in time with a callback for each. Setting a name again moves it."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Hashable]] = []
        self._live: dict[Hashable, tuple[int, Callable[[], None]]] = {}
        self._order = itertools.count()

    def set(self, name: Hashable, at: float, callback: Callable[[], None]) -> None:
        """Call `callback` at `at`, in place of what was set under this name before."""
        order = next(self._order)
        self._live[name] = (order, callback)
        heapq.heappush(self._heap, (at, order, name))

    def cancel(self, name: Hashable) -> None:
        """Remove a name. Does nothing where there is none."""
        self._live.pop(name, None)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._live

    def next_deadline(self) -> float | None:
        """Return when the next timer is due; None: there is none."""
        # Stopped and moved timers stay in the heap until their time; keep them a minority.
        if len(self._heap) > 64 + 2 * len(self._live):
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)
        while self._heap and not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _is_live(self, entry: tuple[float, int, Hashable]) -> bool:
        live = self._live.get(entry[2])
        return live is not None and live[0] == entry[1]

    def run_next(self, now: float) -> bool:
        """Run the timer that is due first; return whether there was one."""
        at = self.next_deadline()
        if at is None or at > now:
            return False
        _, _, name = heapq.heappop(self._heap)
        _, callback = self._live.pop(name)
        callback()
        return True
