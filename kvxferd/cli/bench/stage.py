"""Both sides of one transport: a daemon each and the baselines' processes, and engines that come and go."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kvxferd.cli.bench import speech
from kvxferd.cli.bench.cases import Case
from kvxferd.cli.bench.hosts import VERB, Actor, Host, Seat
from kvxferd.cli.bench.shapes import FIRST, ROLES, Deployment, Role
from kvxferd.cli.running import together
from kvxferd.errors import Code, KvxferdError
from kvxferd.ids import Rank

GRANT_S = 30.0
_LOOK_S = 0.002

Hosts = Mapping[Role, Host]

_names = itertools.count()


@dataclass
class Stage:
    """Daemons and baselines of one transport. `environment` is what the transport library is told."""

    hosts: Hosts
    environment: Mapping[str, str]
    seats: dict[Role, Seat] = field(default_factory=dict)
    raw: dict[Role, Actor] = field(default_factory=dict)
    engine: dict[Role, Actor] = field(default_factory=dict)
    copy: Actor | None = None

    @classmethod
    @asynccontextmanager
    async def open(
        cls, hosts: Hosts, environment: Mapping[str, str], baselines: bool = True
    ) -> AsyncIterator[Stage]:
        """Start it; at the end everything on it is ended."""
        stage = cls(hosts, environment)
        try:
            await stage._start(baselines)
            yield stage
        finally:
            await stage._stop()

    @property
    def copies(self) -> bool:
        """Whether one process can map both sides' memory."""
        return self.copy is not None

    @asynccontextmanager
    async def pair(self, deployment: Deployment, baselines: bool = True) -> AsyncIterator[Pair]:
        """Give two engines of this deployment, registered with a daemon each."""
        pair = Pair(self, deployment)
        try:
            await pair.start()
            if baselines:
                await self._attach(pair)
            yield pair
        finally:
            await pair.stop()

    async def _start(self, baselines: bool) -> None:
        async def seat(role: Role) -> None:
            self.seats[role] = await self.hosts[role].start_daemon(self.environment)

        async def agents(role: Role) -> None:
            self.raw[role] = await self.hosts[role].spawn("raw", self.environment)
            self.engine[role] = await self.hosts[role].spawn("engine", self.environment)

        await together(*map(seat, ROLES))
        if baselines:
            await together(*map(agents, ROLES))
            if all(host.is_here for host in self.hosts.values()):
                self.copy = await self.hosts["sink"].spawn("copy", self.environment)

    async def _stop(self) -> None:
        actors = [*self.raw.values(), *self.engine.values(), *([self.copy] if self.copy else [])]
        await asyncio.gather(*(actor.stop() for actor in actors))
        await asyncio.gather(*(seat.stop() for seat in self.seats.values()))

    async def _attach(self, pair: Pair) -> None:
        """Give the baselines the memory of the pair's first ranks."""
        for agents in (self.raw, self.engine):
            await together(*(agents[role].resume() for role in ROLES))
            attached = {}
            for role in ROLES:
                command = speech.Attach(deployment=pair.deployment, memory=pair.memory[role, FIRST])
                attached[role] = await agents[role].ask(command, speech.Attached)
            source = attached["source"]
            await agents["sink"].ask(
                speech.Meet(metadata=source.metadata, address=source.address), speech.Done
            )
        # Their progress threads would take both cores for good.
        await together(*(self.engine[role].pause() for role in ROLES))
        if self.copy is not None:
            sink, source_memory = pair.memory["sink", FIRST], pair.memory["source", FIRST]
            await self.copy.ask(speech.Attach(deployment=pair.deployment, memory=sink), speech.Attached)
            await self.copy.ask(speech.MeetMemory(memory=source_memory), speech.Done)


@dataclass
class Batch:
    """Transfers that were published for one round."""

    names: list[str]
    refs: list[dict[str, Any]]


class Pair:
    """Two engines of one deployment: what is published by one, and pulled by the other."""

    def __init__(self, stage: Stage, deployment: Deployment) -> None:
        self.stage = stage
        self.deployment = deployment
        self.actors: dict[tuple[Role, Rank], Actor] = {}
        self.memory: dict[tuple[Role, Rank], speech.Place] = {}
        self._batches: list[Batch] = []

    @property
    def ranks(self) -> list[Rank]:
        """Every rank, on each side."""
        return list(self.deployment.engine("source"))

    async def start(self) -> None:
        """Start every rank's process and register it."""
        places = [(role, rank) for role in ROLES for rank in self.ranks]

        async def begin(role: Role, rank: Rank) -> None:
            actor = await self.stage.hosts[role].spawn("rank", {})
            self.actors[role, rank] = actor
            socket = self.stage.seats[role].worker_socket
            command = speech.Begin(deployment=self.deployment, role=role, rank=rank, worker_socket=socket)
            self.memory[role, rank] = (await actor.ask(command, speech.Begun)).memory

        await together(*(begin(role, rank) for role, rank in places))

    async def stop(self) -> None:
        """End every rank's process; the daemons let go of its memory."""
        await asyncio.gather(*(actor.stop() for actor in self.actors.values()))

    async def publish(self, case: Case, count: int) -> Batch:
        """Publish so many transfers of a case."""
        names = [f"{self.deployment.name}-{next(_names)}" for _ in range(count)]
        answer = await self.source.ask(speech.Publish(case=case, names=names), speech.Published)
        return Batch(names, answer.refs)

    async def publish_prepared(self, case: Case, count: int) -> Batch:
        """Publish them, have every sink rank prepare them, and wait until all grants are there."""
        before = await self.num_grants()
        batch = await self.publish(case, count)
        await self.prepare(batch)
        await self.await_grants(before + count * len(self.ranks))
        return batch

    async def prepare(self, batch: Batch) -> None:
        """Have every sink rank say that it will pull these."""
        command = speech.Prepare(refs=batch.refs)
        await together(*(self.actors["sink", rank].ask(command, speech.Done) for rank in self.ranks))

    async def num_grants(self) -> int:
        """Return how many grants the sink's daemon holds."""
        answer = await self.stage.seats["sink"].get("/v1/peers")
        return sum(peer["num_grants"] for peer in answer["peers"])

    async def await_grants(self, count: int) -> None:
        """Wait until so many are held. Raises KvxferdError when they do not come."""
        deadline = time.monotonic() + GRANT_S
        while (held := await self.num_grants()) < count:
            if time.monotonic() > deadline:
                raise KvxferdError(f"cannot run {VERB}: {held} of {count} grants came", Code.DEADLINE)
            await asyncio.sleep(_LOOK_S)

    async def release(self, batch: Batch) -> None:
        """Wait until the transfers are over."""
        command = speech.AwaitRelease(names=batch.names)
        await self.source.ask(command, speech.Done)

    async def everywhere(self, role: Role, command: speech.Command) -> None:
        """Have every rank of a side do it."""
        await together(*(self.actors[role, rank].ask(command, speech.Done) for rank in self.ranks))

    async def require_right(self, check: speech.Check) -> None:
        """Have every sink rank compare what it holds. Raises KvxferdError where a word is wrong."""
        for rank in self.ranks:
            answer = await self.actors["sink", rank].ask(check, speech.Checked)
            if answer.wrong:
                case = check.case
                raise KvxferdError(
                    f"cannot run {VERB}: {answer.wrong} wrong words in {rank} of {case.deployment.shape}, "
                    f"{case.lists.value}, {case.blocks} blocks"
                )

    @property
    def source(self) -> Actor:
        """The rank that publishes."""
        return self.actors["source", FIRST]

    @property
    def sink(self) -> Actor:
        """The first rank that pulls."""
        return self.actors["sink", FIRST]
