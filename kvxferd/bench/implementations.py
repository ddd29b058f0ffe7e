"""The implementations that the bench compares: kvxferd, NIXL in two set-ups, and a plain copy."""

from __future__ import annotations

from typing import Protocol

from kvxferd.bench import protocol
from kvxferd.bench.cases import Case
from kvxferd.bench.hosts import WorkerHandle
from kvxferd.bench.protocol import Sample
from kvxferd.bench.testbed import EnginePair
from kvxferd.tooling.async_tasks import gather_or_cancel

KVXFERD, RAW, ENGINE, COPY, ONE_COPY = "kvxferd", "raw", "engine", "copy", "one copy"

TITLES = {
    KVXFERD: "kvxferd: pull() to Delivered, prepared",
    RAW: "NIXL, two plain processes, the same runs, polled by hand: post to done",
    ENGINE: "NIXL as the in-engine connector sets it up: block ids to done",
    COPY: "memory copy of the same runs",
    ONE_COPY: "memory copy of as many bytes in one stretch",
}


class Implementation(Protocol):
    """One way to move a case."""

    @property
    def name(self) -> str:
        """Its name in results."""
        ...

    @property
    def is_verifiable(self) -> bool:
        """Whether the bytes land where the case places them, so that they can be checked."""
        ...

    async def move(self, case: Case, count: int, window: int) -> list[Sample]:
        """Move `count` requests; work that is not timed happens before."""
        ...


class KvxferdPulls:
    """Pulls through two daemons; prepared, so that the grants exist."""

    name = KVXFERD
    is_verifiable = True

    def __init__(self, pair: EnginePair, is_prepared: bool = True) -> None:
        self._pair = pair
        self._is_prepared = is_prepared

    async def move(self, case: Case, count: int, window: int) -> list[Sample]:
        """Publish, prepare, pull."""
        pair = self._pair
        batch = await (pair.publish_prepared if self._is_prepared else pair.publish)(case, count)
        command = protocol.PullCommand(case=case, refs=batch.refs, window=window)
        moved = await pair.sink.request(command, protocol.Moved)
        await pair.release(batch)
        return moved.samples


class RawNixl:
    """Raw NIXL; its source polls by hand during the reads."""

    name = RAW
    is_verifiable = True

    def __init__(self, pair: EnginePair) -> None:
        self._source, self._sink = pair.testbed.raw_workers["source"], pair.testbed.raw_workers["sink"]

    async def move(self, case: Case, count: int, window: int) -> list[Sample]:
        """Have the source poll, and read."""
        await self._source.request(protocol.SetPolling(on=True), protocol.Done)
        try:
            moved = await self._sink.request(
                protocol.Move(case=case, count=count, window=window), protocol.Moved
            )
        finally:
            await self._source.request(protocol.SetPolling(on=False), protocol.Done)
        return moved.samples


class EngineNixl:
    """NIXL as the in-engine connector sets it up; its progress threads run during its own rounds only."""

    name = ENGINE
    is_verifiable = True

    def __init__(self, pair: EnginePair) -> None:
        self._agents = pair.testbed.engine_workers

    async def move(self, case: Case, count: int, window: int) -> list[Sample]:
        """Resume both processes, and read."""
        await gather_or_cancel(*(agent.resume() for agent in self._agents.values()))
        try:
            command = protocol.Move(case=case, count=count, window=window)
            moved = await self._agents["sink"].request(command, protocol.Moved)
        finally:
            await gather_or_cancel(*(agent.pause() for agent in self._agents.values()))
        return moved.samples


class MemoryCopy:
    """A plain memory copy."""

    def __init__(self, copier: WorkerHandle, as_one: bool = False) -> None:
        self._copier = copier
        self._as_one = as_one
        self.name = ONE_COPY if as_one else COPY
        self.is_verifiable = not as_one

    async def move(self, case: Case, count: int, window: int) -> list[Sample]:
        """Copy the runs, or all bytes as one."""
        command = protocol.Move(case=case, count=count, window=window, as_one=self._as_one)
        return (await self._copier.request(command, protocol.Moved)).samples


def implementations_of(pair: EnginePair) -> list[Implementation]:
    """Return every implementation that this pair's testbed has."""
    found: list[Implementation] = [KvxferdPulls(pair), RawNixl(pair), EngineNixl(pair)]
    if pair.testbed.copy_worker is not None:
        found += [MemoryCopy(pair.testbed.copy_worker), MemoryCopy(pair.testbed.copy_worker, as_one=True)]
    return found
