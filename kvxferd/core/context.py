"""What all parts of one node share: the time of the event being fed, the timers, and the effects."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from kvxferd.core.effects import Effect
from kvxferd.core.limits.ledger import Ledger
from kvxferd.core.settings import Settings
from kvxferd.fair_queue import FairQueue
from kvxferd.ids import BootId, Endpoint
from kvxferd.timers import Timers

# A turn of the loop feeds one `Tick`, and any number of other events. Each runs so many timers, and calls put
# off, at most. A pull that ends takes 300 us with what its record costs: a user can have a thousand
# pulls with the same deadline.
CALLS_PER_TICK, CALLS_PER_EVENT = 64, 4
MAX_TURN_BYTES = 8 << 20  # of block ids in the replies of these calls: 10 ms


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
        self.ledger = Ledger(settings.limits)
        self.timers = Timers()
        self.now = 0.0
        self.draining = False
        self._effects: list[Effect] = []
        self._num_bytes = 0  # of block ids in what was emitted since `run_due` began
        self._put_off: FairQueue[Hashable, Callable[[], None]] = FairQueue()

    def emit(self, effect: Effect, num_bytes: int = 0) -> None:
        """Append an effect. The shell carries them out in this order. `num_bytes`: of block ids in it."""
        self._effects.append(effect)
        self._num_bytes += num_bytes

    def after(self, name: Hashable, delay_s: float, callback: Callable[[], None]) -> None:
        """Set a timer `delay_s` seconds from now."""
        self.timers.set(name, self.now + delay_s, callback)

    def put_off(self, owner: Hashable, callback: Callable[[], None]) -> None:
        """Call `callback` after this event or one of the next. There may be thousands: owners take turns."""
        self._put_off.put(owner, callback)

    def run_due(self, most: int) -> None:
        """Run so many at most of the timers that are due, and of what was put off.

        `next_deadline` is not in the future while more are due.
        """
        self._num_bytes = 0
        for _ in range(most):
            if self._num_bytes >= MAX_TURN_BYTES:
                return
            if not self.timers.run_next(self.now):
                if not self._put_off:
                    return
                self._put_off.get()[1]()

    def next_deadline(self) -> float | None:
        """Return when something is due; None: never, unless an event comes."""
        return self.now if self._put_off else self.timers.next_deadline()

    @property
    def is_behind(self) -> bool:
        """Whether more is due than one event runs."""
        deadline = self.next_deadline()
        return deadline is not None and deadline <= self.now

    def pop_effects(self) -> list[Effect]:
        """Return the effects since the last call, in order."""
        effects, self._effects = self._effects, []
        return effects
