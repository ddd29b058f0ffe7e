"""Where the bench's processes run: this machine, or (see `remote_client`) another one."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from kvxferd.bench import protocol
from kvxferd.errors import KvxferdError
from kvxferd.tooling.daemon_process import DaemonProcess
from kvxferd.tooling.line_protocol import Line
from kvxferd.tooling.subprocesses import CommandProcess

TOOL = "the bench"

WorkerKind = Literal["rank", "raw", "engine"]

_WORKER_MODULES: dict[WorkerKind, tuple[str, tuple[str, ...]]] = {
    "rank": ("kvxferd.bench.rank_process", ()),
    "raw": ("kvxferd.bench.nixl_process", ("raw",)),
    "engine": ("kvxferd.bench.nixl_process", ("engine",)),
}

R = TypeVar("R", bound=Line)


class WorkerHandle(Protocol):
    """A process that handles the bench's commands."""

    async def request(self, command: protocol.Command, kind: type[R]) -> R:
        """Return its reply to a command. Raises KvxferdError if the command fails."""
        ...

    async def pause(self) -> None:
        """Stop its execution: some processes would spin a core while others are timed."""
        ...

    async def resume(self) -> None:
        """Continue its execution."""
        ...

    async def stop(self) -> None:
        """End it. Idempotent."""
        ...


class DaemonHandle(Protocol):
    """A daemon of the bench."""

    @property
    def worker_socket(self) -> str:
        """Where its ranks connect."""
        ...

    @property
    def pid(self) -> int:
        """Its process id, on its own machine."""
        ...

    async def get(self, path: str) -> Any:
        """Return the response of its control socket."""
        ...

    async def stop(self) -> None:
        """End it. Idempotent."""
        ...


class Host(Protocol):
    """Starts processes somewhere and ends them."""

    @property
    def is_local(self) -> bool:
        """Whether it is this machine, whose memory and processes can be inspected."""
        ...

    async def start_daemon(self, environment: Mapping[str, str]) -> DaemonHandle:
        """Start a daemon and wait until it takes registrations. Raises KvxferdError."""
        ...

    async def start_worker(self, kind: WorkerKind, environment: Mapping[str, str]) -> WorkerHandle:
        """Start a process. Raises KvxferdError."""
        ...

    async def stop(self) -> None:
        """End everything that was started."""
        ...


class LocalDaemon:
    """A daemon on this machine."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._daemon = daemon
        self.worker_socket = daemon.worker_socket
        self.pid = daemon.pid

    async def get(self, path: str) -> Any:
        """Return the response of its control socket."""
        return await asyncio.to_thread(self._daemon.control.get, path)

    async def stop(self) -> None:
        """Have it drain and end."""
        await asyncio.to_thread(self._daemon.stop)


class LocalHost:
    """This machine; all files are in one directory, which its owner removes."""

    is_local = True

    def __init__(self, directory: Path, peer_host: str = "127.0.0.1") -> None:
        self._directory = directory
        self._peer_host = peer_host
        self._number = 0
        self._started: list[CommandProcess | LocalDaemon] = []

    async def start_daemon(self, environment: Mapping[str, str]) -> LocalDaemon:
        """Start a daemon and wait until it takes registrations."""
        directory = Path(tempfile.mkdtemp(prefix="node-", dir=self._directory))
        daemon = DaemonProcess(directory, environ=environment, peer_host=self._peer_host)
        local = LocalDaemon(daemon)
        self._started.append(local)
        try:
            await asyncio.to_thread(daemon.wait_ready)
        except KvxferdError as error:
            raise KvxferdError(f"{error.message}\n{daemon.log_tail()}", error.code) from None
        return local

    async def start_worker(self, kind: WorkerKind, environment: Mapping[str, str]) -> CommandProcess:
        """Start a process."""
        self._number += 1
        module, flags = _WORKER_MODULES[kind]
        name = f"{kind}-{self._number}"
        worker = await CommandProcess.start(
            TOOL, module, name, self._directory, protocol.PROTOCOL, environment, flags
        )
        self._started.append(worker)
        return worker

    async def stop(self) -> None:
        """End everything, workers before daemons, so that ranks can unregister."""
        started, self._started = self._started, []
        await asyncio.gather(*(one.stop() for one in started if isinstance(one, CommandProcess)))
        await asyncio.gather(*(one.stop() for one in started if isinstance(one, LocalDaemon)))
