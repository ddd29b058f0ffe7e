"""The implementations that the bench compares: kvxferd, and NIXL in two set-ups."""

from __future__ import annotations

from typing import Protocol

from kvxferd.bench import protocol
from kvxferd.bench.cases import Case
from kvxferd.bench.protocol import Sample
from kvxferd.bench.testbed import RunningEngines
from kvxferd.tooling.async_tasks import gather_or_cancel

KVXFERD, RAW, ENGINE = "kvxferd", "raw", "engine"

TITLES = {
    KVXFERD: "kvxferd: pull() to Delivered, prepared",
    RAW: "NIXL, two plain processes, the same runs, polled by hand: post to done",
    ENGINE: "NIXL as the in-engine connector sets it up: block ids to done",
}


class Implementation(Protocol):
    """One way to move a case."""

    @property
    def name(self) -> str:
        """Its name in results."""
        ...

    async def move(self, case: Case, count: int, window: int) -> list[Sample]:
        """Move `count` requests; work that is not timed happens before."""
        ...


class KvxferdPulls:
    """Pulls through two daemons; prepared, so that the grants exist."""

    name = KVXFERD

    def __init__(self, pair: RunningEngines, is_prepared: bool = True) -> None:
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

    def __init__(self, pair: RunningEngines) -> None:
        self._source, self._sink = pair.testbed.raw_workers["source"], pair.testbed.raw_workers["sink"]

    async def move(self, case: Case, count: int, window: int) -> list[Sample]:
        """Have the source poll, and read."""
        await self._source.request(protocol.SetManualPolling(on=True), protocol.CommandDone)
        try:
            moved = await self._sink.request(
                protocol.Move(case=case, count=count, window=window), protocol.Moved
            )
        finally:
            await self._source.request(protocol.SetManualPolling(on=False), protocol.CommandDone)
        return moved.samples


class EngineNixl:
    """NIXL as the in-engine connector sets it up; its progress threads run during its own rounds only."""

    name = ENGINE

    def __init__(self, pair: RunningEngines) -> None:
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


def implementations_of(pair: RunningEngines) -> list[Implementation]:
    """Return every implementation."""
    return [KvxferdPulls(pair), RawNixl(pair), EngineNixl(pair)]
