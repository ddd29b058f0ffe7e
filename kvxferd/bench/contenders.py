"""Who moves a case, and how they take turns: each round in another order, and each time checked."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from kvxferd.bench.baselines import NixlAgent
from kvxferd.bench.cases import Case
from kvxferd.bench.rank import BenchRank, Sample
from kvxferd.bench.testbed import RunningEngines
from kvxferd.errors import KvxferdError

KVXFERD, RAW, ENGINE = "kvxferd", "raw", "engine"

TITLES = {
    KVXFERD: "kvxferd: pull() to Delivered, prepared",
    RAW: "NIXL, two plain processes, the same runs, polled by hand: post to done",
    ENGINE: "NIXL as the in-engine connector sets it up: block ids to done",
}

_numbers = itertools.count(1)


@dataclass
class Contender(ABC):
    """One way to move a case between two engines."""

    engines: RunningEngines
    case: Case
    name: str  # in results

    @abstractmethod
    def move(self, count: int, window: int) -> list[Sample]:
        """Move so many requests, at most so many at a time; work that is not timed happens before."""


@dataclass
class KvxferdPulls(Contender):
    """Pulls through two daemons by one rank after the other, a sample of each; prepared: the grants exist."""

    name: str = KVXFERD
    is_prepared: bool = True

    def move(self, count: int, window: int) -> list[Sample]:
        """Publish, prepare, pull."""
        engines = self.engines
        batch = (engines.publish_prepared if self.is_prepared else engines.publish)(self.case, count)
        samples = []
        for rank in engines.pair.engine("decode"):
            samples += engines.ranks["decode", rank].call(BenchRank.pull_all, batch, window)
        engines.release(batch)
        return samples


@dataclass
class RawNixl(Contender):
    """Raw NIXL; its source polls by hand during the reads."""

    name: str = RAW

    def move(self, count: int, window: int) -> list[Sample]:
        """Have the source poll, and read."""
        agents = self.engines.testbed.raw_agents
        agents["prefill"].call(NixlAgent.set_polling, True)
        samples = agents["decode"].call(NixlAgent.move, self.case, count, window)
        agents["prefill"].call(NixlAgent.set_polling, False)
        return samples


@dataclass
class EngineNixl(Contender):
    """NIXL as in an engine; its progress threads run during its own rounds only."""

    name: str = ENGINE

    def move(self, count: int, window: int) -> list[Sample]:
        """Resume both processes, and read."""
        agents = self.engines.testbed.engine_agents
        for agent in agents.values():
            agent.resume()
        samples = agents["decode"].call(NixlAgent.move, self.case, count, window)
        for agent in agents.values():
            agent.pause()
        return samples


def contenders_of(engines: RunningEngines, case: Case) -> list[Contender]:
    """Return kvxferd and both baselines."""
    return [KvxferdPulls(engines, case), RawNixl(engines, case), EngineNixl(engines, case)]


@dataclass
class Round:
    """The result of one contender in one round."""

    samples: list[Sample]  # one or several of each request
    window: int
    count: int  # of requests

    @property
    def num_bytes(self) -> int:
        """The bytes that were moved."""
        return sum(sample.bytes for sample in self.samples)

    @property
    def seconds(self) -> float:
        """The time of the requests: their sum, or from first to last if several ran at once."""
        # The time in which a baseline builds its request does not count against it: only post to done.
        if self.window == 1:
            return sum(sample.seconds for sample in self.samples)
        return max(one.ended for one in self.samples) - min(one.built for one in self.samples)


Rounds = dict[str, list[Round]]  # by contender


def interleave(contenders: Sequence[Contender], rounds: int, count: int, window: int = 1) -> Rounds:
    """Move `count` requests of its case a round by each contender in turn.

    Before that each moves all slots once, with new content, and every byte is compared. In each round the
    ends of blocks have new content, and are compared. Raises KvxferdError if a byte is wrong.
    """
    found: Rounds = {one.name: [] for one in contenders}
    amounts = {one.name: sum(sample.bytes for sample in verify_all_bytes(one, window)) for one in contenders}
    if len(set(amounts.values())) > 1:
        raise KvxferdError(f"cannot compare: bytes moved differ: {amounts}")
    for number in range(rounds):
        for one in order_in_round(contenders, number):
            samples = _move_checked(one, count, window, one.case.ends_of)
            found[one.name].append(Round(samples, window, count))
    return found


def order_in_round(contenders: Sequence[Contender], number: int) -> list[Contender]:
    """Return the order of a round: each is first in some round, and none always follows another."""
    turn = number % len(contenders)
    order = [*contenders[turn:], *contenders[:turn]]
    # With a mere rotation the same one would always go before, with its caches and its movers still polling.
    return order if number % 2 == 0 else order[::-1]


def verify_all_bytes(contender: Contender, window: int = 1) -> list[Sample]:
    """Have a contender move new content of every slot, and compare every byte. Raises as `interleave`."""
    return _move_checked(contender, contender.case.slots, window, 0)


def write_content(engines: RunningEngines, case: Case, ends_of: int = 0) -> int:
    """Write new content of all slots, or of the ends of so many tokens; return its number."""
    number = next(_numbers)
    engines.call_all("prefill", BenchRank.write_all, case, number, ends_of)
    return number


def _move_checked(contender: Contender, count: int, window: int, ends_of: int) -> list[Sample]:
    engines, case = contender.engines, contender.case
    number = write_content(engines, case, ends_of)
    samples = contender.move(count, window)
    try:
        engines.require_right(case, number, min(count, case.slots), ends_of)
    except KvxferdError as error:
        raise KvxferdError(f"{error.message}; moved by {contender.name}", error.code) from error
    return samples
