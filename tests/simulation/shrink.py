"""Cuts an episode that breaks a promise down to what it takes to fail the same check."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

from msgspec.structs import replace

from tests.simulation import runs
from tests.simulation.episode import Plan, Result
from tests.simulation.world import Traits

MAX_RUNS = 200


class Shrinker:
    """Runs an episode again and again with less in it."""

    def __init__(self, plan: Plan, max_runs: int = MAX_RUNS) -> None:
        self.plan = plan
        self.check = runs.run(plan).check
        self._runs_left = max_runs

    def shrink(self) -> Result:
        """Return the smallest episode found, with its story. Raises ValueError if nothing is broken."""
        if not self.check:
            raise ValueError(f"episode {self.plan.seed} breaks no promise")
        before = None
        while before != self.plan and self._runs_left > 0:
            before = self.plan
            self._cut_faults()
            for smaller in self._smaller_plans():
                self._try(smaller)
        return runs.run(self.plan, keeps_story=True)

    def _cut_faults(self) -> None:
        """Leave out halves, then quarters, down to single faults."""
        size = max(1, len(self.plan.faults) // 2)
        while True:
            start = 0
            while start < len(self.plan.faults):
                faults = self.plan.faults
                if not self._try(replace(self.plan, faults=faults[:start] + faults[start + size :])):
                    start += size
            if size == 1:
                return
            size //= 2

    def _smaller_plans(self) -> Iterator[Plan]:
        """Yield plans with fewer nodes, fewer or idle engines, plain traits, and less traffic."""
        size = self.plan.size
        if size.nodes > 2:
            yield replace(self.plan, size=replace(size, nodes=size.nodes - 1))
        if size.engines > 2:
            yield replace(self.plan, size=replace(size, engines=size.engines - 1))
        for name in self.plan.engines:
            if name not in self.plan.idle:
                yield replace(self.plan, idle=(*self.plan.idle, name))
        yield replace(self.plan, spans=False)
        plain = Traits()
        for name in Traits.__dataclass_fields__:
            value = getattr(plain, name)
            if getattr(self.plan.traits, name) != value:
                yield replace(self.plan, traits=_with(self.plan.traits, name, value))
        if self.plan.max_pulls > 8:
            yield replace(self.plan, max_pulls=self.plan.max_pulls // 2)

    def _try(self, plan: Plan) -> bool:
        """Take a plan if it fails the same check."""
        if self._runs_left <= 0:
            return False
        self._runs_left -= 1
        if runs.run(plan).check != self.check:
            return False
        self.plan = plan
        return True

    def describe(self) -> str:
        """Return what is left, a line for each fault."""
        busy = [name for name in self.plan.engines if name not in self.plan.idle]
        parties = f"{self.plan.size.nodes} nodes, engines {', '.join(busy)}"
        lines = [f"{len(self.plan.faults)} faults, {parties}, {self.plan.traits}:"]
        lines += [f"  at pull {f.pull} + {f.delay_s * 1e3:.3f} ms: {f.kind}" for f in self.plan.faults]
        return "\n".join(lines)


def _with(traits: Traits, name: str, value: object) -> Traits:
    return Traits(**{field: getattr(traits, field) for field in Traits.__dataclass_fields__} | {name: value})


def shrink(plan: Plan, out: IO[str]) -> tuple[Plan, Result]:
    """Shrink an episode, and print what is left of it."""
    shrinker = Shrinker(plan)
    result = shrinker.shrink()
    print(shrinker.describe(), file=out)
    return shrinker.plan, result
