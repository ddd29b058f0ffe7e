"""The ways to move a case that are compared: kvxferd, NIXL in two set-ups, and a plain copy."""

from __future__ import annotations

from typing import Protocol

from kvxferd.cli.bench import speech
from kvxferd.cli.bench.cases import Case
from kvxferd.cli.bench.hosts import Actor
from kvxferd.cli.bench.speech import Sample
from kvxferd.cli.bench.stage import Pair
from kvxferd.cli.running import together

KVXFERD, RAW, ENGINE, COPY, ONE_COPY = "kvxferd", "raw", "engine", "copy", "one copy"

TITLES = {
    KVXFERD: "kvxferd: pull() to Delivered, prepared",
    RAW: "NIXL, two plain processes, the same runs, polled by hand: post to done",
    ENGINE: "NIXL as the in-engine connector sets it up: block ids to done",
    COPY: "memory copy of the same runs",
    ONE_COPY: "memory copy of as many bytes in one stretch",
}


class Contender(Protocol):
    """One way."""

    @property
    def name(self) -> str:
        """Its name in results."""
        ...

    @property
    def moves_runs(self) -> bool:
        """Whether the bytes of the case land where the case says, and can be checked."""
        ...

    async def move(self, case: Case, count: int, window: int) -> list[Sample]:
        """Move so many requests; what is not timed happens before."""
        ...


class Kvxferd:
    """Pulls through two daemons; prepared, so that the grants are there."""

    name = KVXFERD
    moves_runs = True

    def __init__(self, pair: Pair, is_prepared: bool = True, lends: bool = False, gap_s: float = 0.0) -> None:
        """`lends`: block ids are lent to the client, not copied by it. `gap_s`: between two pulls."""
        self._pair = pair
        self._is_prepared = is_prepared
        self._lends = lends
        self._gap_s = gap_s

    async def move(self, case: Case, count: int, window: int) -> list[Sample]:
        """Publish, prepare, pull."""
        pair = self._pair
        batch = await (pair.publish_prepared if self._is_prepared else pair.publish)(case, count)
        command = speech.Pull(case=case, refs=batch.refs, window=window, lent=self._lends, gap_s=self._gap_s)
        moved = await pair.sink.ask(command, speech.Moved)
        await pair.release(batch)
        return moved.samples


class Raw:
    """Raw NIXL; its source polls by hand meanwhile."""

    name = RAW
    moves_runs = True

    def __init__(self, pair: Pair) -> None:
        self._source, self._sink = pair.stage.raw["source"], pair.stage.raw["sink"]

    async def move(self, case: Case, count: int, window: int) -> list[Sample]:
        """Have the source attend, and read."""
        await self._source.ask(speech.Attend(on=True), speech.Done)
        try:
            moved = await self._sink.ask(speech.Move(case=case, count=count, window=window), speech.Moved)
        finally:
            await self._source.ask(speech.Attend(on=False), speech.Done)
        return moved.samples


class Engine:
    """NIXL as the in-engine connector sets it up; its progress threads run in its own turns only."""

    name = ENGINE
    moves_runs = True

    def __init__(self, pair: Pair) -> None:
        self._agents = pair.stage.engine

    async def move(self, case: Case, count: int, window: int) -> list[Sample]:
        """Let both processes run, and read."""
        await together(*(agent.resume() for agent in self._agents.values()))
        try:
            command = speech.Move(case=case, count=count, window=window)
            moved = await self._agents["sink"].ask(command, speech.Moved)
        finally:
            await together(*(agent.pause() for agent in self._agents.values()))
        return moved.samples


class Copy:
    """A plain copy."""

    def __init__(self, copier: Actor, as_one: bool = False) -> None:
        self._copier = copier
        self._as_one = as_one
        self.name = ONE_COPY if as_one else COPY
        self.moves_runs = not as_one

    async def move(self, case: Case, count: int, window: int) -> list[Sample]:
        """Copy."""
        command = speech.Move(case=case, count=count, window=window, as_one=self._as_one)
        return (await self._copier.ask(command, speech.Moved)).samples


def contenders_of(pair: Pair) -> list[Contender]:
    """Return all that this pair's stage has."""
    found: list[Contender] = [Kvxferd(pair), Raw(pair), Engine(pair)]
    if pair.stage.copy is not None:
        found += [Copy(pair.stage.copy), Copy(pair.stage.copy, as_one=True)]
    return found
