"""The states of one host, each reached by a trace of steps from the start and known by its digest."""

from __future__ import annotations

from dataclasses import dataclass

from tests.property.model.host import Host, Reach, Step
from tests.property.model.scenario import Scenario
from tests.property.model.steps import reads_of, steps_of

MAX_LIVE = 512  # hosts kept, so that most steps need no replay


@dataclass(frozen=True)
class View:
    """What the exploration needs to know of a host in one state."""

    steps: tuple[Step, ...]  # that it can take by itself, time apart
    reads: tuple[tuple[Step, str, int], ...]  # steps that want a block or a fence word of the other host
    reach: dict[str, Reach]  # by agent: the memory and the fence words that can be read through it
    is_up: bool  # a daemon is there
    due: bool
    deadlines: tuple[float, ...]
    leftovers: tuple[str, ...]


class Broken(Exception):
    """A promise is broken; the text says which, `trace` how it came about."""

    def __init__(self, text: str, trace: list[str] | None = None) -> None:
        super().__init__("\n  ".join([text, *(trace or [])]))
        self.text = text
        self.trace = trace or []


class States:
    """Every state found so far, and what each step does in it: worked out once, by replay."""

    def __init__(self, name: str, scenario: Scenario) -> None:
        self._name = name
        self._scenario = scenario
        self._by_key: dict[bytes, int] = {}
        self._came: list[tuple[int, Step]] = []  # from which state, by which step
        self._done: dict[tuple[int, Step], tuple[int, tuple[bytes, ...]] | str] = {}
        self._live: dict[int, Host] = {}
        self.views: list[View] = []
        self._add(Host(name, scenario), -1, ())

    def __len__(self) -> int:
        return len(self.views)

    @property
    def num_steps(self) -> int:
        """Different steps that the real core was made to take."""
        return len(self._done)

    def take(self, state: int, step: Step) -> tuple[int, tuple[bytes, ...]]:
        """Return the state after the step, and the messages for the other host. Raises Broken."""
        known = self._done.get((state, step))
        if known is None:
            known = self._done[state, step] = self._work_out(state, step)
        if isinstance(known, str):
            raise Broken(f"{self._name}, {' '.join(map(str, step))}: {known}")
        return known

    def _work_out(self, state: int, step: Step) -> tuple[int, tuple[bytes, ...]] | str:
        host = self._live.pop(state, None) or self._replay(state)
        try:
            sent = tuple(host.do(step))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return self._add(host, state, step), sent

    def _replay(self, state: int) -> Host:
        trace = []
        while state != 0:
            state, step = self._came[state]
            trace.append(step)
        host = Host(self._name, self._scenario)
        for step in reversed(trace):
            host.do(step)
        return host

    def _add(self, host: Host, before: int, step: Step) -> int:
        key = host.key()
        number = self._by_key.get(key)
        if number is None:
            number = self._by_key[key] = len(self.views)
            self._came.append((before, step))
            self.views.append(view_of(host))
        self._live[number] = host
        if len(self._live) > MAX_LIVE:
            self._live.pop(next(iter(self._live)))
        return number


def view_of(host: Host) -> View:
    """Return what the exploration may see of a host."""
    return View(
        steps=tuple(steps_of(host)),
        reads=tuple(reads_of(host)),
        reach=host.reach(),
        is_up=host.is_up,
        due=host.due(),
        deadlines=tuple(host.deadlines()),
        leftovers=tuple(host.leftovers()),
    )
