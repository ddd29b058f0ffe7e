"""Both sides of one transport: a daemon each, the baselines' processes, and the engines of each case."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, TypeVar

from kvxferd.bench.cases import Case
from kvxferd.bench.nixl_process import NixlAgent
from kvxferd.bench.processes import TOOL, AgentProcess, BenchProcesses, RankProcess
from kvxferd.bench.rank_process import BenchRank, Ref
from kvxferd.bench.shapes import FIRST_RANK, ROLES, BenchDeployment, Role
from kvxferd.bench.shared_memory import ProcessMemory
from kvxferd.errors import Code, KvxferdError
from kvxferd.ids import Rank
from kvxferd.tooling.daemon_process import DaemonProcess
from kvxferd.tooling.owned_process import stop_all

P = ParamSpec("P")
T = TypeVar("T")

GRANT_TIMEOUT_S = 30.0
_GRANT_POLL_S = 0.002

_names = itertools.count()


@dataclass
class Testbed:
    """Daemons and baselines of one transport. `environment` has the transport library's settings."""

    processes: BenchProcesses
    environment: Mapping[str, str]
    sink_settings: Mapping[str, str] = field(default_factory=dict)  # of the sink's daemon alone
    daemons: dict[Role, DaemonProcess] = field(default_factory=dict)
    raw_agents: dict[Role, AgentProcess] = field(default_factory=dict)
    engine_agents: dict[Role, AgentProcess] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def open(
        cls,
        processes: BenchProcesses,
        environment: Mapping[str, str],
        baselines: bool = True,
        sink_settings: Mapping[str, str] | None = None,
    ) -> Iterator[Testbed]:
        """Start the testbed; everything on it ends with the block."""
        testbed = cls(processes, environment, sink_settings or {})
        try:
            testbed._start(baselines)
            yield testbed
        finally:
            testbed._stop()

    @contextmanager
    def pair(self, deployment: BenchDeployment, baselines: bool = True) -> Iterator[RunningEngines]:
        """Give two engines of this deployment, registered with a daemon each."""
        pair = RunningEngines(self, deployment)
        try:
            pair.start()
            if baselines:
                self._attach(pair)
            yield pair
        finally:
            pair.stop()

    def _start(self, baselines: bool) -> None:
        settings: dict[Role, Mapping[str, str]] = {"source": {}, "sink": self.sink_settings}
        environments = [{**self.environment, **settings[role]} for role in ROLES]
        self.daemons.update(zip(ROLES, self.processes.start_daemons(environments), strict=True))
        for role in ROLES if baselines else ():
            self.raw_agents[role] = self.processes.start_agent("raw", self.environment)
            self.engine_agents[role] = self.processes.start_agent("engine", self.environment)
            # Once it is made, until there is a pair to attach: see `_attach`.
            self.engine_agents[role].call(NixlAgent.set_polling, False)
            self.engine_agents[role].pause()

    def _stop(self) -> None:
        stop_all([*self.raw_agents.values(), *self.engine_agents.values()])
        stop_all(self.daemons.values())

    def _attach(self, pair: RunningEngines) -> None:
        """Give the baselines the memory of the pair's first ranks."""
        for agents in (self.raw_agents, self.engine_agents):
            for agent in agents.values():
                agent.resume()
            attached = {
                role: agents[role].call(NixlAgent.attach, pair.deployment, pair.memory[role, FIRST_RANK])
                for role in ROLES
            }
            agents["sink"].call(NixlAgent.add_remote, attached["source"])
        # Otherwise their progress threads would keep both cores busy.
        for agent in self.engine_agents.values():
            agent.pause()


@dataclass
class PublishedBatch:
    """The transfers that were published for one round."""

    names: list[str]
    refs: list[Ref]


class RunningEngines:
    """Two engines of one deployment: one publishes and the other pulls."""

    def __init__(self, testbed: Testbed, deployment: BenchDeployment) -> None:
        self.testbed = testbed
        self.deployment = deployment
        self.workers: dict[tuple[Role, Rank], RankProcess] = {}
        self.memory: dict[tuple[Role, Rank], ProcessMemory] = {}

    @property
    def ranks(self) -> list[Rank]:
        """The ranks that pull; unless the sides differ, those of the source too."""
        return self.ranks_of("sink")

    def ranks_of(self, role: Role) -> list[Rank]:
        """Return the ranks of one side."""
        return list(self.deployment.engine(role))

    def start(self) -> None:
        """Start every rank's process and register it."""
        for place in [(role, rank) for role in ROLES for rank in self.ranks_of(role)]:
            self.workers[place] = self.testbed.processes.start_rank()
        begun = {}
        for (role, rank), worker in self.workers.items():
            socket = self.testbed.daemons[role].worker_socket
            begun[role, rank] = worker.start(BenchRank.begin, self.deployment, role, rank, socket)
        self.memory = {place: pending.result() for place, pending in begun.items()}

    def stop(self) -> None:
        """End every rank's process; the daemons unmap its memory."""
        stop_all(self.workers.values())

    def publish(self, case: Case, count: int) -> PublishedBatch:
        """Publish `count` transfers of a case."""
        names = [f"{self.deployment.name}-{next(_names)}" for _ in range(count)]
        return PublishedBatch(names, self.source.call(BenchRank.publish_all, case, names))

    def publish_prepared(self, case: Case, count: int) -> PublishedBatch:
        """Publish transfers, have every sink rank prepare them, and wait until all grants are held."""
        before = self.num_grants()
        batch = self.publish(case, count)
        self.call_all("sink", BenchRank.prepare_all, batch.refs)
        self.await_grants(before + count * len(self.ranks))
        return batch

    def num_grants(self) -> int:
        """Return how many grants the sink's daemon holds."""
        reply = self.testbed.daemons["sink"].control.get("/v1/peers")
        return sum(peer["num_grants"] for peer in reply["peers"])

    def await_grants(self, count: int) -> None:
        """Wait until `count` grants are held. Raises KvxferdError if they do not come."""
        deadline = time.monotonic() + GRANT_TIMEOUT_S
        while (held := self.num_grants()) < count:
            if time.monotonic() > deadline:
                raise KvxferdError(f"cannot run {TOOL}: {held} of {count} grants came", Code.DEADLINE)
            time.sleep(_GRANT_POLL_S)

    def release(self, batch: PublishedBatch) -> None:
        """Wait until the transfers are released."""
        self.source.call(BenchRank.await_release, batch.names)

    def call_all(
        self,
        role: Role,
        method: Callable[Concatenate[BenchRank, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[T]:
        """Call every rank of a side, side by side; return their results in the order of the ranks."""
        started = [self.workers[role, rank].start(method, *args, **kwargs) for rank in self.ranks_of(role)]
        return [pending.result() for pending in started]

    def require_correct(self, case: Case, nonce: int, slots: int, is_whole: bool = False) -> None:
        """Have every sink rank compare the first slots: the ends of runs, or every word.

        Raises KvxferdError if a word is wrong.
        """
        for rank in self.ranks:
            wrong = self.workers["sink", rank].call(BenchRank.count_wrong, case, nonce, slots, is_whole)
            if wrong:
                raise KvxferdError(
                    f"cannot run {TOOL}: {wrong} wrong words in {rank} of {case.deployment.shape}, "
                    f"{case.lists.value}, {case.blocks} blocks"
                )

    @property
    def source(self) -> RankProcess:
        """The rank that publishes."""
        return self.workers["source", FIRST_RANK]

    @property
    def sink(self) -> RankProcess:
        """The first rank that pulls."""
        return self.workers["sink", FIRST_RANK]
