"""Child processes of the bench, which reply to commands. None outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from kvxferd.die_with_parent import module_command
from kvxferd.errors import Code, KvxferdError
from kvxferd.tooling.line_protocol import LineProtocol, encode_line

R = TypeVar("R")

# A child has deadlines of its own and reports them; this limit is for one that is stuck.
REPLY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 10.0
# A line carries references, samples or a report, never block ids.
MAX_LINE_BYTES = 8 << 20
_DISCARD_BYTES = 1 << 16
TAIL_LINES = 12


class CommandProcess:
    """A Python module that runs `command_loop`: it replies to each command on standard input."""

    def __init__(
        self, tool: str, name: str, log: Path, process: Process, protocol: LineProtocol[Any, Any]
    ) -> None:
        self.name = name
        self._tool = tool
        self._protocol = protocol
        self._is_paused = False
        self._log = log
        self._process = process

    @classmethod
    async def start(
        cls,
        tool: str,
        module: str,
        name: str,
        directory: Path,
        protocol: LineProtocol[Any, Any],
        environment: Mapping[str, str] | None = None,
        flags: tuple[str, ...] = (),
    ) -> CommandProcess:
        """Start it; it waits for its first command."""
        path = directory / f"{name}.log"
        with path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *module_command(module, *flags),
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                limit=MAX_LINE_BYTES,
                env=None if environment is None else {**os.environ, **environment},
                start_new_session=True,
            )
        return cls(tool, name, path, process, protocol)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def request(self, command: Any, kind: type[R]) -> R:
        """Return its reply to a command. Raises KvxferdError if that fails, it ends or sends no line."""
        try:
            reply = await asyncio.wait_for(self._exchange_lines(encode_line(command)), REPLY_TIMEOUT_S)
        except TimeoutError:
            raise KvxferdError(
                f"cannot run {self._tool}: process {self.name} has not answered for {REPLY_TIMEOUT_S:.0f} s",
                Code.DEADLINE,
            ) from None
        except ValueError:  # of `readline`, which has its own limit
            raise KvxferdError(
                f"cannot run {self._tool}: process {self.name} sent a line of more than "
                f"{MAX_LINE_BYTES} bytes"
            ) from None
        if not reply:
            raise KvxferdError(
                f"cannot run {self._tool}: process {self.name} ended: {_last_lines(self._log)}"
            )
        return self._protocol.decode_reply(reply, kind, self._tool, self.name)

    async def pause(self) -> None:
        """Stop its execution: some processes would spin a core while others are timed."""
        self._is_paused = True
        _send_signal(self._process, signal.SIGSTOP)

    async def resume(self) -> None:
        """Continue its execution."""
        if self._is_paused:
            _send_signal(self._process, signal.SIGCONT)
            self._is_paused = False

    async def stop(self) -> None:
        """Close its standard input and wait for its end; kill it after STOP_TIMEOUT_S. Idempotent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        await self.resume()  # a stopped process would not read the end of its input
        self._process.stdin.close()
        # asyncio reports the end of a process after that of its output: what is left there must be read.
        discarding = asyncio.ensure_future(_discard(self._process.stdout))
        try:
            await _wait_or_kill(self._process)
        finally:
            discarding.cancel()
            await asyncio.gather(discarding, return_exceptions=True)

    async def _exchange_lines(self, line: bytes) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(ConnectionError):  # then there is no reply either
            self._process.stdin.write(line)
            await self._process.stdin.drain()
        return await self._process.stdout.readline()


async def _wait_or_kill(process: Process) -> None:
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    except TimeoutError:
        _send_signal(process, signal.SIGKILL)
        await process.wait()


def _send_signal(process: Process, signum: signal.Signals) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):  # it has ended, and the loop does not know yet
            process.send_signal(signum)


async def _discard(output: asyncio.StreamReader) -> None:
    while await output.read(_DISCARD_BYTES):
        pass


def _last_lines(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join(lines[-TAIL_LINES:])
