"""Virtual time: what happens next, and the record of what has happened."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.support.sim.schedule import Act, Schedule

MAX_STEPS_AT_ONCE = 20_000  # without a step of time: whoever makes more never stops


class Agenda(Schedule):
    """The one list of everything that is to happen. Times are in seconds from the episode's start."""

    def __init__(self, seed: int, keeps_trace: bool = False) -> None:
        super().__init__()
        self.num_steps = 0
        self.rng = random.Random(seed)
        self.trace: list[str] | None = [] if keeps_trace else None
        self._digest = hashlib.sha256()
        self._num_at_once = 0

    def run_next(self, until: float) -> bool:
        before = self.now
        is_run = super().run_next(until)
        self.num_steps += is_run
        self._num_at_once = self._num_at_once + 1 if self.now == before else 0
        if self._num_at_once > MAX_STEPS_AT_ONCE:
            raise RuntimeError("time stands still: something is called again and again")
        return is_run

    def run(self, until: float, is_over: Callable[[], bool] | None = None) -> None:
        """Do all that is due by `until`, or until `is_over`."""
        while self.run_next(until):
            if is_over is not None and is_over():
                return
        self.now = max(self.now, until)

    def note(self, actor: str, what: str) -> None:
        """Put a line into the trace."""
        line = f"{self.now:.6f} {actor}: {what}"
        self._digest.update(line.encode())
        if self.trace is not None:
            self.trace.append(line)

    def digest(self) -> str:
        """Return the digest of all lines until now."""
        return self._digest.hexdigest()


class Actor:
    """A process: it does nothing while it is stopped, and nothing any more once it is dead."""

    def __init__(self, agenda: Agenda, name: str) -> None:
        self.agenda = agenda
        self.name = name
        self.is_alive = True
        self.is_stopped = False
        self.last_stop_at = -1.0  # when it was last stopped or continued
        self._held: deque[tuple[Act, tuple[Any, ...]]] = deque()

    def note(self, what: str) -> None:
        """Put a line into the trace."""
        self.agenda.note(self.name, what)

    def after(self, delay_s: float, act: Act, *arguments: Any) -> None:
        """Have this process do something after so many seconds, if it still runs then."""
        self.agenda.after(delay_s, self._run, act, arguments)

    def at(self, when: float, act: Act, *arguments: Any) -> None:
        """Have this process do something at that time, if it still runs then."""
        self.agenda.at(when, self._run, act, arguments)

    def _run(self, act: Act, arguments: tuple[Any, ...]) -> None:
        if not self.is_alive:
            return
        if self.is_stopped or self._held:
            self._held.append((act, arguments))
        else:
            act(*arguments)

    def stop(self) -> None:
        """SIGSTOP."""
        self.is_stopped = True
        self.last_stop_at = self.agenda.now

    def resume(self) -> None:
        """SIGCONT: what waited is done now, in order."""
        self.is_stopped = False
        self.last_stop_at = self.agenda.now
        self.agenda.after(0.0, self._do_held)

    def _do_held(self) -> None:
        """Do all that has waited before anything that comes at the same time."""
        while self._held and self.is_alive and not self.is_stopped:
            act, arguments = self._held[0]
            act(*arguments)
            self._held.popleft()


class Pipe:
    """One direction of a stream: messages arrive in the order sent, each when it may."""

    def __init__(self, receiver: Actor, latency_s: Callable[[], float]) -> None:
        self._receiver = receiver
        self._latency_s = latency_s
        self._last_arrival = 0.0

    def send(self, act: Act, *arguments: Any) -> None:
        """Have the receiver do something, after everything that was sent before."""
        agenda = self._receiver.agenda
        self._last_arrival = max(self._last_arrival, agenda.now + self._latency_s())
        self._receiver.at(self._last_arrival, act, *arguments)

    def delay(self, seconds: float) -> None:
        """Hold back all that is sent from now on for so long."""
        self._last_arrival = max(self._last_arrival, self._receiver.agenda.now + seconds)
