"""The demo's child processes: two daemons and a worker for each rank. None of them outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress
from pathlib import Path

from kvxferd.cli.asking import Daemon
from kvxferd.cli.demo import speech
from kvxferd.errors import Code, KvxferdError

READY_S = 60.0  # a cold start on a machine that may be busy
# A daemon that answers, and says for this long that it is not ready, has a reason that will not pass.
NOT_READY_S = 5.0
POLL_S = 0.05
# A worker keeps deadlines of its own and says so; this is for one that is stuck.
ANSWER_S = 180.0
STOP_S = 10.0
# A line carries a reference or a report, never block ids.
LINE_BYTES = 1 << 20
TAIL_LINES = 12


class DaemonProcess:
    """A daemon in a directory of its own."""

    def __init__(self, name: str, directory: Path, process: Process) -> None:
        self.name = name
        self.worker_socket = str(directory / "worker.sock")
        self.control = Daemon(str(directory / "control.sock"))
        self._log = directory / "daemon.log"
        self._process = process

    @classmethod
    async def start(cls, name: str, directory: Path) -> DaemonProcess:
        """Start it. Settings of the environment do not reach it, but for those of its movers."""
        environ = {k: v for k, v in os.environ.items() if not k.startswith("KVXFERD_")}
        environ |= {k: v for k, v in os.environ.items() if k.startswith("KVXFERD_MOVER_")}
        with (directory / "daemon.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "kvxferd.cli.demo.tether", "serve"),
                *("--node-run-dir", str(directory), "--http-bind", "", "--peer-bind", "tcp://127.0.0.1:0"),
                *("--drain-limit-s", "5", "--log-format", "json"),
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                env=environ,
                start_new_session=True,  # Ctrl-C is for the demo, which then stops this
            )
        return cls(name, directory, process)

    async def ready(self) -> None:
        """Wait until it takes registrations. Raises KvxferdError if it ends, or is not ready in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + READY_S
        why = ""
        while loop.time() < deadline:
            if self._process.returncode is not None:
                raise KvxferdError(
                    f"cannot run the demo: the {self.name} daemon ended with {self._process.returncode}"
                )
            with suppress(KvxferdError):
                status, answer = await asyncio.to_thread(self.control.ask, "GET", "/readyz")
                if status == 200:
                    return
                if not why:
                    deadline = min(deadline, loop.time() + NOT_READY_S)
                why = "; ".join(answer.get("reasons", [])) or f"it answers {status}"
            await asyncio.sleep(POLL_S)
        raise KvxferdError(
            f"cannot run the demo: the {self.name} daemon is not ready: {why or 'it does not answer'}",
            Code.DEADLINE,
        )

    async def stop(self) -> None:
        """Have it drain and end; kill it if it does not."""
        await _stop(self._process, signal.SIGTERM)

    def tail(self) -> str:
        """Return the last lines of its log."""
        return _tail(self._log)


class WorkerProcess:
    """One rank of one engine."""

    def __init__(self, name: str, log: Path, process: Process) -> None:
        self.name = name
        self._log = log
        self._process = process

    @classmethod
    async def start(cls, name: str, directory: Path) -> WorkerProcess:
        """Start it; it waits for `Begin`."""
        path = directory / f"{name}.log"
        with path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "kvxferd.cli.demo.worker"),
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                limit=LINE_BYTES,
                start_new_session=True,
            )
        return cls(name, path, process)

    async def ask(self, command: speech.Command) -> speech.Reply:
        """Return its answer. Raises KvxferdError if it cannot go on."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(ConnectionError):  # then there is no answer either
            self._process.stdin.write(speech.to_line(command))
            await self._process.stdin.drain()
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), ANSWER_S)
        except TimeoutError:
            raise KvxferdError(
                f"cannot run the demo: worker {self.name} has not answered for {ANSWER_S:.0f} s",
                Code.DEADLINE,
            ) from None
        if not line:
            raise KvxferdError(f"cannot run the demo: worker {self.name} ended: {_tail(self._log)}")
        reply = speech.read_reply(line)
        if isinstance(reply, speech.Broken):
            raise KvxferdError(f"cannot run the demo: worker {self.name}: {reply.message}")
        return reply

    async def stop(self) -> None:
        """Have it leave and end; kill it if it does not."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        await _stop(self._process, None)


async def _stop(process: Process, how: signal.Signals | None) -> None:
    if process.returncode is None and how is not None:
        process.send_signal(how)
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "\n".join(lines[-TAIL_LINES:])
