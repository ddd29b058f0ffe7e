"""The loop around decisions that do no I/O: events in, effects out, and a timer."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from kvxferd.core.effects import Effect
from kvxferd.core.events import Event, Tick
from kvxferd.core.node import Node

log = structlog.get_logger()


@dataclass(slots=True)
class DecisionLoop:
    """Feeds a node one event at a time, and carries out its effects before the next.

    An exception is a bug of ours: it is logged, and the other effects and events go on.
    """

    node: Callable[[], Node]
    carry_out: Callable[[Effect], None]
    after_events: Callable[[], None] = lambda: None  # called when no event waits to be fed
    _events: deque[Event] = field(default_factory=deque)
    _is_feeding: bool = False
    _timer: asyncio.TimerHandle | None = None
    _timer_at: float = 0.0

    def feed(self, event: Event) -> None:
        """Feed an event: now, or behind those that are being fed."""
        self._events.append(event)
        if self._is_feeding:
            return
        self._is_feeding, node = True, self.node()
        while self._events:
            for effect in self._decide(node, self._events.popleft()):
                try:
                    self.carry_out(effect)
                except Exception:
                    log.exception("effect failed", kind=type(effect).__name__)
        self._is_feeding = False
        self._set_timer(node.next_deadline())
        self.after_events()

    def _decide(self, node: Node, event: Event) -> list[Effect]:
        try:
            # Not the loop's clock: uvloop's has steps of a millisecond, and a small pull takes less.
            return node.feed(event, time.monotonic())
        except Exception:
            log.exception("event failed", kind=type(event).__name__)
            return node.context.pop_effects()  # what was decided before it raised

    def _set_timer(self, deadline: float | None) -> None:
        # A timer that fires too early costs an event; setting a new one for each event costs more.
        if deadline is not None and (self._timer is None or deadline < self._timer_at):
            if self._timer is not None:
                self._timer.cancel()
            delay_s = max(0.0, deadline - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)
            self._timer_at = deadline

    def _on_timer(self) -> None:
        self._timer = None
        self.feed(Tick())
