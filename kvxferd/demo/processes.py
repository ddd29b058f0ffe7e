"""The demo's child processes: a worker for each rank, in the demo's own words."""

from __future__ import annotations

from pathlib import Path

from kvxferd.demo import protocol
from kvxferd.errors import KvxferdError
from kvxferd.tooling.subprocesses import CommandProcess

TOOL = "the demo"


class WorkerProcess:
    """One rank of one engine."""

    def __init__(self, process: CommandProcess) -> None:
        self._process = process

    @classmethod
    async def start(cls, name: str, directory: Path) -> WorkerProcess:
        """Start it; it waits for `StartRank`."""
        return cls(await CommandProcess.start(TOOL, "kvxferd.demo.worker", name, directory))

    async def request(self, command: protocol.Command) -> protocol.Reply:
        """Return its reply. Raises KvxferdError if the command fails."""
        reply = protocol.decode_reply(await self._process.request(protocol.encode_line(command)))
        if isinstance(reply, protocol.CommandFailed):
            raise KvxferdError(f"cannot run {TOOL}: worker {self._process.name}: {reply.message}")
        return reply

    async def stop(self) -> None:
        """Have it unregister and end; kill it if it does not."""
        await self._process.stop()
