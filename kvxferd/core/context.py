"""What all parts of one node share: the time of the event being fed, the timers, and the effects."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable

from kvxferd.core.effects import Effect
from kvxferd.core.settings import Settings
from kvxferd.ids import BootId, Endpoint

# One event runs this many timers at most, and as many callbacks of one list. A pull that ends takes 110 us:
# 7 ms a turn. A user can have a thousand pulls with the same deadline.
CALLS_PER_TURN = 64


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
        # Stopped and moved timers stay in the heap until their time; keep them a minority.
        if len(self._heap) > 64 + 2 * len(self._live):
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def cancel(self, name: Hashable) -> None:
        """Remove a name. Does nothing where there is none."""
        self._live.pop(name, None)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._live

    def next_deadline(self) -> float | None:
        """Return when the next timer is due; None: there is none."""
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


class NodeContext:
    """Handed to every part of the core. `now` and the effects belong to the event being fed."""

    def __init__(
        self, *, boot: BootId, endpoint: Endpoint, settings: Settings, new_token: Callable[[], str]
    ) -> None:
        self.boot = boot
        self.endpoint = endpoint
        self.settings = settings
        self.allowlist = settings.allowlist  # until the operator changes it
        self.new_token = new_token  # 32 random hex digits
        self.timers = Timers()
        self.now = 0.0
        self.draining = False
        self._effects: list[Effect] = []
        self._before_next_event: dict[Hashable, Callable[[], None]] = {}
        self._num_deferred = 0

    def emit(self, effect: Effect) -> None:
        """Append an effect. The shell carries them out in this order."""
        self._effects.append(effect)

    def after(self, name: Hashable, delay_s: float, callback: Callable[[], None]) -> None:
        """Set a timer `delay_s` seconds from now."""
        self.timers.set(name, self.now + delay_s, callback)

    def before_next_event(self, name: Hashable, callback: Callable[[], None]) -> None:
        """Call `callback` after the caller has returned, before another event is fed."""
        self._before_next_event[name] = callback

    def run_in_batches(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Run the first few now, and the others as timers that are due: there may be thousands."""
        for index, callback in enumerate(callbacks):
            if index < CALLS_PER_TURN:
                callback()
            else:
                self._num_deferred += 1
                self.after(("deferred", self._num_deferred), 0.0, callback)

    def run_due(self) -> None:
        """Run `CALLS_PER_TURN` due timers at most. `next_deadline` is in the past while more are due."""
        for _ in range(CALLS_PER_TURN):
            self._run_before_next_event()
            if not self.timers.run_next(self.now):
                return
        self._run_before_next_event()

    def _run_before_next_event(self) -> None:
        while self._before_next_event:
            name = next(iter(self._before_next_event))
            self._before_next_event.pop(name)()

    def is_stale(self, last_used: float) -> bool:
        """Whether `last_used` is older than `max_hold_s`: then no running pull still needs it."""
        return self.now - last_used > self.settings.max_hold_s

    def pop_effects(self) -> list[Effect]:
        """Return the effects since the last call, in order."""
        effects, self._effects = self._effects, []
        return effects
