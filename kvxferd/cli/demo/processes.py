"""The demo's child processes: a worker for each rank, in the demo's own words."""

from __future__ import annotations

from pathlib import Path

from kvxferd.cli.children import LineProcess
from kvxferd.cli.demo import speech
from kvxferd.errors import KvxferdError

VERB = "the demo"


class WorkerProcess:
    """One rank of one engine."""

    def __init__(self, process: LineProcess) -> None:
        self._process = process

    @classmethod
    async def start(cls, name: str, directory: Path) -> WorkerProcess:
        """Start it; it waits for `Begin`."""
        return cls(await LineProcess.start(VERB, "kvxferd.cli.demo.worker", name, directory))

    async def ask(self, command: speech.Command) -> speech.Reply:
        """Return its answer. Raises KvxferdError if it cannot go on."""
        reply = speech.read_reply(await self._process.ask(speech.to_line(command)))
        if isinstance(reply, speech.Broken):
            raise KvxferdError(f"cannot run {VERB}: worker {self._process.name}: {reply.message}")
        return reply

    async def stop(self) -> None:
        """Have it leave and end; kill it if it does not."""
        await self._process.stop()
