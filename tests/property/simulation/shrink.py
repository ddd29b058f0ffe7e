"""Cuts an episode that breaks a promise down to the faults and engines that it takes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from tests.property.simulation.episode import Episode, Result, Size
from tests.property.simulation.faults import Fault

MAX_RUNS = 400


class Shrinker:
    """Runs an episode again and again with less in it, while it breaks the same kind of promise."""

    def __init__(self, seed: int, size: Size, max_runs: int = MAX_RUNS) -> None:
        self._seed = seed
        self._size = size
        self._runs_left = max_runs
        whole = Episode(seed, size)
        self._faults: list[Fault] = whole.drawn
        self._idle: frozenset[str] = frozenset()
        self._engines = [engine.engine_id for engine in whole.world.engines]
        self._kind = whole.run().kind

    def shrink(self) -> Result:
        """Return the smallest episode found, with its trace. Raises ValueError if nothing is broken."""
        if not self._kind:
            raise ValueError(f"episode {self._seed} breaks no promise")
        before = None
        while before != (before := (len(self._faults), len(self._idle))):
            self._cut_faults()
            self._cut_engines()
        result = self._episode(self._faults, self._idle, keeps_trace=True).run()
        assert result.kind == self._kind
        return result

    def _cut_faults(self) -> None:
        """Leave out halves, then quarters, down to single faults."""
        size = max(1, len(self._faults) // 2)
        while True:
            start = 0
            while start < len(self._faults):
                fewer = self._faults[:start] + self._faults[start + size :]
                if self._still_breaks(fewer, self._idle):
                    self._faults = fewer
                else:
                    start += size
            if size == 1:
                return
            size //= 2

    def _cut_engines(self) -> None:
        """Have engines publish and pull nothing, one after another."""
        for engine in self._engines:
            if engine not in self._idle and self._still_breaks(self._faults, self._idle | {engine}):
                self._idle |= {engine}

    def _still_breaks(self, faults: list[Fault], idle: frozenset[str]) -> bool:
        if self._runs_left <= 0:
            return False
        self._runs_left -= 1
        return self._episode(faults, idle).run().kind == self._kind

    def _episode(self, faults: Iterable[Fault], idle: frozenset[str], keeps_trace: bool = False) -> Episode:
        return Episode(self._seed, self._size, list(faults), keeps_trace, idle)

    def describe(self) -> str:
        """Return what is left, a line for each fault."""
        busy = [engine for engine in self._engines if engine not in self._idle]
        lines = [f"{len(self._faults)} faults, engines {', '.join(busy)}:"]
        lines += [f"  at pull {f.pull} + {f.delay_s * 1e3:.3f} ms: {f.kind}" for f in self._faults]
        return "\n".join(lines)


def shrink_and_print(seed: int, size: Size, show: Callable[[str], object] = sys.stderr.write) -> Result:
    """Shrink an episode; show its trace and what is left of it."""
    shrinker = Shrinker(seed, size)
    result = shrinker.shrink()
    show("\n".join([*result.trace, shrinker.describe(), f"{result.kind}: {result.problem}", ""]))
    return result
