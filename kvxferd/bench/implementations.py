"""The implementations that the bench compares: kvxferd, and NIXL in two set-ups."""

from __future__ import annotations

from typing import Protocol

from kvxferd.bench.cases import Case
from kvxferd.bench.nixl_process import NixlAgent
from kvxferd.bench.rank_process import BenchRank
from kvxferd.bench.samples import Sample
from kvxferd.bench.testbed import RunningEngines

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

    def move(self, case: Case, count: int, window: int) -> list[Sample]:
        """Move `count` requests; work that is not timed happens before."""
        ...


class KvxferdPulls:
    """Pulls through two daemons; prepared, so that the grants exist."""

    name = KVXFERD

    def __init__(self, pair: RunningEngines, is_prepared: bool = True) -> None:
        self._pair = pair
        self._is_prepared = is_prepared

    def move(self, case: Case, count: int, window: int) -> list[Sample]:
        """Publish, prepare, pull."""
        pair = self._pair
        batch = (pair.publish_prepared if self._is_prepared else pair.publish)(case, count)
        samples = pair.sink.call(BenchRank.pull_all, case, batch.refs, window)
        pair.release(batch)
        return samples


class RawNixl:
    """Raw NIXL; its source polls by hand during the reads."""

    name = RAW

    def __init__(self, pair: RunningEngines) -> None:
        self._source, self._sink = pair.testbed.raw_agents["source"], pair.testbed.raw_agents["sink"]

    def move(self, case: Case, count: int, window: int) -> list[Sample]:
        """Have the source poll, and read."""
        self._source.call(NixlAgent.set_polling, True)
        samples = self._sink.call(NixlAgent.move, case, count, window)
        self._source.call(NixlAgent.set_polling, False)
        return samples


class EngineNixl:
    """NIXL as the in-engine connector sets it up; its progress threads run during its own rounds only."""

    name = ENGINE

    def __init__(self, pair: RunningEngines) -> None:
        self._agents = pair.testbed.engine_agents

    def move(self, case: Case, count: int, window: int) -> list[Sample]:
        """Resume both processes, and read."""
        for agent in self._agents.values():
            agent.resume()
        samples = self._agents["sink"].call(NixlAgent.move, case, count, window)
        for agent in self._agents.values():
            agent.pause()
        return samples


def implementations_of(pair: RunningEngines) -> list[Implementation]:
    """Return every implementation."""
    return [KvxferdPulls(pair), RawNixl(pair), EngineNixl(pair)]
