"""Processes: how they die, stop and are waited for.

Promises:

* SIGKILL ends a process also while it is stopped, some time after it was sent.
* A stopped process does nothing. What it was to do waits, in order, until it goes on.
* The death of a process kills its children, also those that are stopped, each in its own time.
* A watcher learns of an exit once, also if it began to watch after it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.property.simulation.agenda import Actor, Agenda

DEATH_DELAYS_S = (0.0001, 0.001, 0.02)  # from a SIGKILL, or a parent's death, until the process is gone


class SimulatedProcess(Actor):
    """One process."""

    def __init__(self, agenda: Agenda, name: str, rng: random.Random) -> None:
        super().__init__(agenda, name)
        self._rng = rng
        self._children: list[SimulatedProcess] = []
        self._watchers: list[Callable[[], None]] = []

    def fork(self, name: str) -> SimulatedProcess:
        """Return a child, which the kernel kills when this process dies."""
        child = SimulatedProcess(self.agenda, name, self._rng)
        self._children.append(child)
        return child

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        self.agenda.after(self._rng.choice(DEATH_DELAYS_S), self.end)

    def watch(self, on_exit: Callable[[], None]) -> None:
        """Call `on_exit` once the process is gone: a pidfd is readable then."""
        if self.is_alive:
            self._watchers.append(on_exit)
        else:
            self.agenda.after(0.0, on_exit)

    def end(self) -> None:
        """It is gone now: it was killed, or ended by itself."""
        if not self.is_alive:
            return
        self.note("dies")
        self.is_alive = False
        for child in self._children:
            child.kill()
        watchers, self._watchers = self._watchers, []
        for on_exit in watchers:
            self.agenda.after(0.0, on_exit)
