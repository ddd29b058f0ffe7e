"""Both sides of one transport: a daemon each, the baselines' processes, and the engines of each case."""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvxferd.bench.baselines import NixlAgent
from kvxferd.bench.cases import FIRST_RANK, Case
from kvxferd.bench.rank import Batch, BenchRank, ProcessMemory
from kvxferd.errors import Code, KvxferdError
from kvxferd.ids import Rank
from kvxferd.mover.shm import remove_shm_directory
from kvxferd.mover.ucx_settings import tls_with_cuda
from kvxferd.tooling.child_process import ChildProcess
from kvxferd.tooling.daemon_process import DaemonProcess
from kvxferd.tooling.engine_pair import ROLES, EnginePair, Role
from kvxferd.tooling.owned_process import stop_all
from kvxferd.tooling.process_vm import read_process_memory

P = ParamSpec("P")
T = TypeVar("T")

TOOL = "the bench"
# The settings of the transfer library, of movers and baselines.
TRANSPORTS: dict[str, dict[str, str]] = {
    # For processes of one user on one machine. UCX sets up connections over TCP here too.
    "cma": {"UCX_TLS": tls_with_cuda("cma,posix,sysv,self,tcp")},
    "tcp": {"UCX_TLS": tls_with_cuda("tcp,self")},
    # As the environment sets it: for machines with a network card.
    "any": {},
}
GRANT_TIMEOUT_S = 30.0
_GRANT_POLL_S = 0.002

_names = itertools.count(1)


class AgentProcess(ChildProcess[NixlAgent]):
    """A process with a NIXL agent. Its library's threads may run, and nothing in it needs an orderly end."""

    def begin_stop(self) -> None:
        """Kill it."""
        if self.exit_code is None:
            self.kill()
            remove_shm_directory(self.pid)
        super().begin_stop()


@dataclass(frozen=True)
class Site:
    """Where testbeds are: the directory of all files, which its owner removes, and the transport."""

    directory: Path
    transport: str  # a name of TRANSPORTS


class Testbed:
    """Daemons and baselines over one transport."""

    def __init__(self, site: Site) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="testbed-", dir=site.directory))
        self._transport = site.transport
        self._environment = TRANSPORTS[site.transport]
        self.daemons: dict[Role, DaemonProcess] = {}
        self.raw_agents: dict[Role, AgentProcess] = {}
        self.engine_agents: dict[Role, AgentProcess] = {}

    @classmethod
    @contextmanager
    def open(cls, site: Site, has_baselines: bool = False, **decode: str) -> Iterator[Testbed]:
        """Start a testbed; everything on it ends with the block. `decode`: settings of its daemon alone.

        Raises KvxferdError if a daemon does not start, or the transport does not work here.
        """
        testbed = cls(site)
        try:
            testbed._start(has_baselines, decode)
            yield testbed
        finally:
            stop_all([*testbed.raw_agents.values(), *testbed.engine_agents.values()])
            stop_all(testbed.daemons.values())

    @contextmanager
    def engines(self, pair: EnginePair) -> Iterator[RunningEngines]:
        """Give two engines, registered with a daemon each; the baselines get their first ranks' memory."""
        engines = RunningEngines(self, pair)
        try:
            engines.start()
            for agents in (self.raw_agents, self.engine_agents):
                self._attach(agents, engines)
            yield engines
        finally:
            stop_all(engines.ranks.values())

    def _start(self, has_baselines: bool, decode: Mapping[str, str]) -> None:
        for role in ROLES:
            own = decode if role == "decode" else {}
            self.daemons[role] = DaemonProcess(self.directory / role, environ={**self._environment, **own})
        for daemon in self.daemons.values():
            try:
                daemon.wait_ready()
            except KvxferdError as error:
                raise KvxferdError(f"{error.message}\n{daemon.log_tail()}", error.code) from None
        if self._transport == "cma":
            _require_cma(self.daemons["prefill"].pid)
        for role in ROLES if has_baselines else ():
            for agents, kind in ((self.raw_agents, "raw"), (self.engine_agents, "engine")):
                log = self.directory / f"{kind}-{role}.log"
                environ = {**os.environ, **self._environment}
                agents[role] = AgentProcess(partial(NixlAgent, kind == "engine"), log, environ)
            # Once it is made, until there are engines to attach: see `_attach`.
            self.engine_agents[role].call(NixlAgent.set_polling, False)
            self.engine_agents[role].pause()

    def _attach(self, agents: Mapping[Role, AgentProcess], engines: RunningEngines) -> None:
        for agent in agents.values():
            agent.resume()
        attached = {
            role: agent.call(NixlAgent.attach, engines.pair, engines.memory[role, FIRST_RANK])
            for role, agent in agents.items()
        }
        if attached:
            agents["decode"].call(NixlAgent.add_remote, attached["prefill"])
        # Otherwise their progress threads would keep both cores busy.
        for agent in self.engine_agents.values():
            agent.pause()


class RunningEngines:
    """Two engines, one of which publishes and the other pulls."""

    def __init__(self, testbed: Testbed, pair: EnginePair) -> None:
        self.testbed = testbed
        self.pair = pair
        self.ranks: dict[tuple[Role, Rank], ChildProcess[BenchRank]] = {}
        self.memory: dict[tuple[Role, Rank], ProcessMemory] = {}

    @property
    def source(self) -> ChildProcess[BenchRank]:
        """The rank that publishes."""
        return self.ranks["prefill", FIRST_RANK]

    @property
    def sink(self) -> ChildProcess[BenchRank]:
        """The first rank that pulls."""
        return self.ranks["decode", FIRST_RANK]

    def start(self) -> None:
        """Start every rank's process and register it."""
        for role in ROLES:
            for rank in self.pair.engine(role):
                log = self.testbed.directory / f"rank-{next(_names)}.log"
                self.ranks[role, rank] = ChildProcess(BenchRank, log)
        begun = {
            (role, rank): process.start(
                BenchRank.begin, self.pair, role, rank, self.testbed.daemons[role].worker_socket
            )
            for (role, rank), process in self.ranks.items()
        }
        self.memory = {place: pending.result() for place, pending in begun.items()}

    def call_all(
        self, role: Role, method: Callable[Concatenate[BenchRank, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Call every rank of a side, side by side; return their results in the order of the ranks."""
        started = [self.ranks[role, rank].start(method, *args, **kwargs) for rank in self.pair.engine(role)]
        return [pending.result() for pending in started]

    def publish(self, case: Case, count: int) -> Batch:
        """Publish `count` transfers of a case."""
        names = [f"{self.pair.name}-{next(_names)}" for _ in range(count)]
        return self.source.call(BenchRank.publish_all, case, names)

    def publish_prepared(self, case: Case, count: int) -> Batch:
        """Publish transfers, have every sink rank prepare them, and wait until all grants are held.

        Raises KvxferdError if they do not come.
        """
        wanted = self._num_grants() + count * len(self.pair.engine("decode"))
        batch = self.publish(case, count)
        self.call_all("decode", BenchRank.prepare_all, batch)
        deadline = time.monotonic() + GRANT_TIMEOUT_S
        while (held := self._num_grants()) < wanted:
            if time.monotonic() > deadline:
                raise KvxferdError(f"cannot run {TOOL}: {held} of {wanted} grants came", Code.DEADLINE)
            time.sleep(_GRANT_POLL_S)
        return batch

    def release(self, batch: Batch) -> None:
        """Wait until the transfers are released."""
        self.source.call(BenchRank.await_release, batch.names)

    def require_right(self, case: Case, number: int, slots: int, ends_of: int = 0) -> None:
        """Have every sink rank compare the first slots: every byte, or the ends of so many tokens.

        Raises KvxferdError if an item is wrong.
        """
        found = self.call_all("decode", BenchRank.count_wrong, case, number, slots, ends_of)
        for rank, wrong in zip(self.pair.engine("decode"), found, strict=True):
            if wrong:
                raise KvxferdError(
                    f"cannot run {TOOL}: {wrong} wrong items in {rank} of {self.pair.name}, "
                    f"{case.pattern.value}, {case.blocks} blocks"
                )

    def _num_grants(self) -> int:
        """Return how many grants the sink's daemon holds."""
        reply: Any = self.testbed.daemons["decode"].control.get("/v1/peers")
        return sum(peer["num_grants"] for peer in reply["peers"])


def _require_cma(pid: int) -> None:
    """Raise KvxferdError if the kernel refuses CMA: UCX would fall back to TCP without an error."""
    start = int(Path(f"/proc/{pid}/maps").read_text().split("-", 1)[0], 16)
    if (failed := read_process_memory(pid, start, 8)) != 0:
        raise KvxferdError(
            f"cannot run {TOOL} over cma: the kernel does not let one process read another's memory "
            f"({os.strerror(failed)}); use --transport tcp"
        )
