"""Both sides of one transport: a daemon each, the baselines' processes, and the engines of each case."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kvxferd.bench import protocol
from kvxferd.bench.cases import Case
from kvxferd.bench.processes import TOOL, BenchProcesses
from kvxferd.bench.shapes import FIRST_RANK, ROLES, BenchDeployment, Role
from kvxferd.errors import Code, KvxferdError
from kvxferd.ids import Rank
from kvxferd.tooling.async_tasks import gather_or_cancel
from kvxferd.tooling.daemon_process import DaemonProcess
from kvxferd.tooling.owned_process import stop_all
from kvxferd.tooling.subprocesses import CommandProcess

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
    raw_workers: dict[Role, CommandProcess] = field(default_factory=dict)
    engine_workers: dict[Role, CommandProcess] = field(default_factory=dict)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        processes: BenchProcesses,
        environment: Mapping[str, str],
        baselines: bool = True,
        sink_settings: Mapping[str, str] | None = None,
    ) -> AsyncIterator[Testbed]:
        """Start the testbed; everything on it ends with the block."""
        testbed = cls(processes, environment, sink_settings or {})
        try:
            await testbed._start(baselines)
            yield testbed
        finally:
            await testbed._stop()

    async def get(self, role: Role, path: str) -> Any:
        """Return the response of that side's daemon. Raises KvxferdError."""
        return await asyncio.to_thread(self.daemons[role].control.get, path)

    @asynccontextmanager
    async def pair(
        self, deployment: BenchDeployment, baselines: bool = True
    ) -> AsyncIterator[RunningEngines]:
        """Give two engines of this deployment, registered with a daemon each."""
        pair = RunningEngines(self, deployment)
        try:
            await pair.start()
            if baselines:
                await self._attach(pair)
            yield pair
        finally:
            await pair.stop()

    async def _start(self, baselines: bool) -> None:
        async def start_daemon(role: Role) -> None:
            settings = self.sink_settings if role == "sink" else {}
            self.daemons[role] = await self.processes.start_daemon({**self.environment, **settings})

        async def agents(role: Role) -> None:
            self.raw_workers[role] = await self.processes.start_worker("raw", self.environment)
            self.engine_workers[role] = await self.processes.start_worker("engine", self.environment)

        await gather_or_cancel(*map(start_daemon, ROLES))
        if baselines:
            await gather_or_cancel(*map(agents, ROLES))

    async def _stop(self) -> None:
        workers = [*self.raw_workers.values(), *self.engine_workers.values()]
        await asyncio.gather(*(worker.stop() for worker in workers))
        await asyncio.to_thread(stop_all, self.daemons.values())

    async def _attach(self, pair: RunningEngines) -> None:
        """Give the baselines the memory of the pair's first ranks."""
        for agents in (self.raw_workers, self.engine_workers):
            await gather_or_cancel(*(agents[role].resume() for role in ROLES))
            attached = {}
            for role in ROLES:
                command = protocol.AttachMemory(
                    deployment=pair.deployment, memory=pair.memory[role, FIRST_RANK]
                )
                attached[role] = await agents[role].request(command, protocol.MemoryAttached)
            source = attached["source"]
            await agents["sink"].request(
                protocol.AddRemote(metadata=source.metadata, address=source.address), protocol.CommandDone
            )
        # Otherwise their progress threads would keep both cores busy.
        await gather_or_cancel(*(self.engine_workers[role].pause() for role in ROLES))


@dataclass
class PublishedBatch:
    """The transfers that were published for one round."""

    names: list[str]
    refs: list[dict[str, Any]]


class RunningEngines:
    """Two engines of one deployment: one publishes and the other pulls."""

    def __init__(self, testbed: Testbed, deployment: BenchDeployment) -> None:
        self.testbed = testbed
        self.deployment = deployment
        self.workers: dict[tuple[Role, Rank], CommandProcess] = {}
        self.memory: dict[tuple[Role, Rank], protocol.ProcessMemory] = {}

    @property
    def ranks(self) -> list[Rank]:
        """The ranks that pull; unless the sides differ, those of the source too."""
        return self.ranks_of("sink")

    def ranks_of(self, role: Role) -> list[Rank]:
        """Return the ranks of one side."""
        return list(self.deployment.engine(role))

    async def start(self) -> None:
        """Start every rank's process and register it."""
        places = [(role, rank) for role in ROLES for rank in self.ranks_of(role)]

        async def begin(role: Role, rank: Rank) -> None:
            worker = await self.testbed.processes.start_worker("rank", {})
            self.workers[role, rank] = worker
            socket = self.testbed.daemons[role].worker_socket
            command = protocol.StartRank(
                deployment=self.deployment, role=role, rank=rank, worker_socket=socket
            )
            self.memory[role, rank] = (await worker.request(command, protocol.RankStarted)).memory

        await gather_or_cancel(*(begin(role, rank) for role, rank in places))

    async def stop(self) -> None:
        """End every rank's process; the daemons unmap its memory."""
        await asyncio.gather(*(worker.stop() for worker in self.workers.values()))

    async def publish(self, case: Case, count: int) -> PublishedBatch:
        """Publish `count` transfers of a case."""
        names = [f"{self.deployment.name}-{next(_names)}" for _ in range(count)]
        reply = await self.source.request(protocol.PublishCommand(case=case, names=names), protocol.Published)
        return PublishedBatch(names, reply.refs)

    async def publish_prepared(self, case: Case, count: int) -> PublishedBatch:
        """Publish transfers, have every sink rank prepare them, and wait until all grants are held."""
        before = await self.num_grants()
        batch = await self.publish(case, count)
        await self.prepare(batch)
        await self.await_grants(before + count * len(self.ranks))
        return batch

    async def prepare(self, batch: PublishedBatch) -> None:
        """Have every sink rank prepare these transfers."""
        command = protocol.PrepareCommand(refs=batch.refs)
        await gather_or_cancel(
            *(self.workers["sink", rank].request(command, protocol.CommandDone) for rank in self.ranks)
        )

    async def num_grants(self) -> int:
        """Return how many grants the sink's daemon holds."""
        reply = await self.testbed.get("sink", "/v1/peers")
        return sum(peer["num_grants"] for peer in reply["peers"])

    async def await_grants(self, count: int) -> None:
        """Wait until `count` grants are held. Raises KvxferdError if they do not come."""
        deadline = time.monotonic() + GRANT_TIMEOUT_S
        while (held := await self.num_grants()) < count:
            if time.monotonic() > deadline:
                raise KvxferdError(f"cannot run {TOOL}: {held} of {count} grants came", Code.DEADLINE)
            await asyncio.sleep(_GRANT_POLL_S)

    async def release(self, batch: PublishedBatch) -> None:
        """Wait until the transfers are released."""
        command = protocol.AwaitRelease(names=batch.names)
        await self.source.request(command, protocol.CommandDone)

    async def request_all(self, role: Role, command: protocol.Command) -> None:
        """Send a command to every rank of a side."""
        await gather_or_cancel(
            *(self.workers[role, rank].request(command, protocol.CommandDone) for rank in self.ranks_of(role))
        )

    async def require_correct(self, check: protocol.Check) -> None:
        """Have every sink rank compare its content. Raises KvxferdError if a word is wrong."""
        for rank in self.ranks:
            reply = await self.workers["sink", rank].request(check, protocol.Checked)
            if reply.wrong:
                case = check.case
                raise KvxferdError(
                    f"cannot run {TOOL}: {reply.wrong} wrong words in {rank} of {case.deployment.shape}, "
                    f"{case.lists.value}, {case.blocks} blocks"
                )

    @property
    def source(self) -> CommandProcess:
        """The rank that publishes."""
        return self.workers["source", FIRST_RANK]

    @property
    def sink(self) -> CommandProcess:
        """The first rank that pulls."""
        return self.workers["sink", FIRST_RANK]
