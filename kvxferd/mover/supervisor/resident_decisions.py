"""The decisions on resident movers: events in, effects out. No I/O and no clock of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from kvxferd.errors import Code, MoverError
from kvxferd.ids import AgentName, BootId, MoverId
from kvxferd.mover.agent_names import is_agent_name
from kvxferd.mover.supervisor.pool_effects import (
    AssignMover,
    DiscardMover,
    RefuseRequest,
    ReportExit,
    ReportMessage,
    ResidentEffect,
)
from kvxferd.mover.supervisor.pool_events import (
    MoverExited,
    MoverReported,
    ResidentEvent,
    ResidentOffered,
    StopRequested,
    TimersDue,
)
from kvxferd.timers import Timers
from kvxferd.wire.mover import FromMover, MoverLeaving, MoverUp

UP_TIMEOUT_S = 20.0  # a worker's first agent takes 0.5 s; a busy engine's GIL makes that longer


class ResidentDecisions:
    """Accepts a resident mover once its agent is made. It is starting until then, and assigned from then on.

    `is_name_used`: whether a mover of this daemon has that agent's name.
    """

    def __init__(self, boot: BootId, is_name_used: Callable[[AgentName], bool]) -> None:
        self._boot = boot
        self._is_name_used = is_name_used
        self._now = 0.0
        self._timers = Timers()
        self._effects: list[ResidentEffect] = []
        self._starting: dict[MoverId, int] = {}  # its worker's process id
        self._assigned: dict[MoverId, None] = {}

    def feed(self, event: ResidentEvent, now: float) -> list[ResidentEffect]:
        """Take one event at a time that never goes back; return the effects, in order."""
        self._now = max(self._now, now)
        self._handle(event)
        while self._timers.run_next(self._now):
            pass
        effects, self._effects = self._effects, []
        return effects

    def next_deadline(self) -> float | None:
        """Return when a `TimersDue` is due; None: never."""
        return self._timers.next_deadline()

    def _handle(self, event: ResidentEvent) -> None:
        match event:
            case ResidentOffered():
                self._starting[event.mover] = event.worker_pid
                at = self._now + UP_TIMEOUT_S
                self._timers.set(event.mover, at, lambda: self._give_up(event.mover))
            case MoverReported():
                self._on_message(event.mover, event.message)
            case MoverExited():
                self._on_exit(event.mover)
            case StopRequested():
                for mover in list(self._starting):
                    self._refuse(mover, "cannot use a resident mover: the daemon stops")
                for mover in self._assigned:
                    self._effects.append(DiscardMover(mover))
                self._assigned.clear()
            case TimersDue():
                pass
            case _:
                assert_never(event)

    def _on_message(self, mover: MoverId, message: FromMover) -> None:
        if mover in self._assigned:
            self._effects.append(ReportMessage(mover, message))
        elif mover in self._starting:
            self._on_first_message(mover, message)

    def _on_first_message(self, mover: MoverId, message: FromMover) -> None:
        match message:
            case MoverUp() if is_agent_name(message.agent, self._boot) and not self._is_name_used(
                message.agent
            ):
                del self._starting[mover]
                self._timers.cancel(mover)
                self._assigned[mover] = None
                self._effects.append(AssignMover(mover, mover))
            case MoverUp():  # peers would read it in place of another of that name
                text = f"cannot use a resident mover called {message.agent[:80]!r}: it is not free here"
                self._refuse(mover, text, Code.OUT_OF_PLACE)
            case MoverLeaving():
                self._refuse(mover, message.message, message.code)

    def _refuse(self, mover: MoverId, text: str, code: Code = Code.MOVER_LOST) -> None:
        del self._starting[mover]
        self._timers.cancel(mover)
        self._effects += [DiscardMover(mover), RefuseRequest(mover, MoverError(text, code))]

    def _give_up(self, mover: MoverId) -> None:
        worker = self._starting[mover]
        text = f"cannot use the resident mover of worker {worker}: no agent in {UP_TIMEOUT_S:g} s"
        self._refuse(mover, text)

    def _on_exit(self, mover: MoverId) -> None:
        if mover in self._assigned:
            del self._assigned[mover]
            self._effects.append(ReportExit(mover))
        elif mover in self._starting:
            worker = self._starting[mover]
            self._refuse(mover, f"the resident mover of worker {worker} ended before its agent was made")

    def check_integrity(self) -> None:
        """Assert what holds between two events."""
        assert not self._starting.keys() & self._assigned.keys(), "a mover is in two states"
        for mover in self._starting:
            assert mover in self._timers, f"mover {mover} may start for ever"
        for mover in self._assigned:
            assert mover not in self._timers
