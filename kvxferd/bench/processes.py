"""The processes that the bench starts: daemons, ranks, and the baselines' agents."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvxferd.bench.nixl_process import AgentKind, NixlAgent
from kvxferd.bench.rank_process import BenchRank
from kvxferd.errors import KvxferdError
from kvxferd.mover.shm import remove_shm_directory
from kvxferd.tooling.child_process import ChildProcess
from kvxferd.tooling.daemon_process import DaemonProcess
from kvxferd.tooling.owned_process import stop_all

TOOL = "the bench"

RankProcess = ChildProcess[BenchRank]


class AgentProcess(ChildProcess[NixlAgent]):
    """A process with a NIXL agent. Its library's threads may run, and nothing in it needs an orderly end."""

    def begin_stop(self) -> None:
        """Kill it."""
        if self.exit_code is None:
            self.kill()
            remove_shm_directory(self.pid)
        super().begin_stop()


class BenchProcesses:
    """What was started; all files are in one directory, which its owner removes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._daemons: list[DaemonProcess] = []
        self._workers: list[ChildProcess[Any]] = []

    def start_daemons(self, environments: Sequence[Mapping[str, str]]) -> list[DaemonProcess]:
        """Start a daemon with each environment; return once all take registrations. Raises KvxferdError."""
        started = []
        for environment in environments:
            directory = Path(tempfile.mkdtemp(prefix="node-", dir=self._directory))
            started.append(DaemonProcess(directory, environ=environment))
            self._daemons.append(started[-1])
        for daemon in started:
            try:
                daemon.wait_ready()
            except KvxferdError as error:
                raise KvxferdError(f"{error.message}\n{daemon.log_tail()}", error.code) from None
        return started

    def start_rank(self) -> RankProcess:
        """Start a process for a rank."""
        rank = RankProcess(BenchRank, self._next_log("rank"))
        self._workers.append(rank)
        return rank

    def start_agent(self, kind: AgentKind, environment: Mapping[str, str]) -> AgentProcess:
        """Start a process with an agent; `environment` has the transport library's settings."""
        agent = AgentProcess(partial(NixlAgent, kind), self._next_log(kind), {**os.environ, **environment})
        self._workers.append(agent)
        return agent

    def stop(self) -> None:
        """End everything, workers before daemons, so that ranks can unregister. Idempotent."""
        stop_all(self._workers)
        stop_all(self._daemons)

    def _next_log(self, kind: str) -> Path:
        return self._directory / f"{kind}-{len(self._workers) + 1}.log"
