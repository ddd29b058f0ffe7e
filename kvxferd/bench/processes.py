"""The processes that the bench starts: daemons, and workers that handle its commands."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from kvxferd.bench import protocol
from kvxferd.errors import KvxferdError
from kvxferd.tooling.daemon_process import DaemonProcess
from kvxferd.tooling.owned_process import stop_all
from kvxferd.tooling.subprocesses import CommandProcess

TOOL = "the bench"

WorkerKind = Literal["rank", "raw", "engine"]

_WORKER_MODULES: dict[WorkerKind, tuple[str, tuple[str, ...]]] = {
    "rank": ("kvxferd.bench.rank_process", ()),
    "raw": ("kvxferd.bench.nixl_process", ("raw",)),
    "engine": ("kvxferd.bench.nixl_process", ("engine",)),
}


class BenchProcesses:
    """What was started and not stopped; all files are in one directory, which its owner removes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._number = 0
        self._daemons: list[DaemonProcess] = []
        self._workers: list[CommandProcess] = []

    async def start_daemon(self, environment: Mapping[str, str]) -> DaemonProcess:
        """Start a daemon and wait until it takes registrations. Raises KvxferdError."""
        directory = Path(tempfile.mkdtemp(prefix="node-", dir=self._directory))
        daemon = DaemonProcess(directory, environ=environment)
        self._daemons.append(daemon)
        try:
            await asyncio.to_thread(daemon.wait_ready)
        except KvxferdError as error:
            raise KvxferdError(f"{error.message}\n{daemon.log_tail()}", error.code) from None
        return daemon

    async def start_worker(self, kind: WorkerKind, environment: Mapping[str, str]) -> CommandProcess:
        """Start a worker."""
        self._number += 1
        module, flags = _WORKER_MODULES[kind]
        name = f"{kind}-{self._number}"
        worker = await CommandProcess.start(
            TOOL, module, name, self._directory, protocol.PROTOCOL, environment, flags
        )
        self._workers.append(worker)
        return worker

    async def stop(self) -> None:
        """End everything, workers before daemons, so that ranks can unregister. Idempotent."""
        await asyncio.gather(*(worker.stop() for worker in self._workers))
        await asyncio.to_thread(stop_all, self._daemons)
