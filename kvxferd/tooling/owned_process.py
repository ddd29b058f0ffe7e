"""A process that a tool starts: it has a log, and ends with the tool."""

from __future__ import annotations

import os
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

STOP_TIMEOUT_S = 10.0
_TAIL_LINES = 12
_TAIL_BYTES = 1 << 16


class OwnedProcess(ABC):
    """One process, and the file to which it prints. Use it from one thread, which outlives the process."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name  # in error messages
        self.log = log
        self._process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal; nothing if it has ended."""
        self._process.send_signal(number)

    def kill(self) -> int:
        """Kill it, whatever it is doing; return its exit code."""
        self._process.kill()
        return self._process.wait()

    @abstractmethod
    def begin_stop(self) -> None:
        """Have it end by itself; `stop` waits."""

    def stop(self, limit_s: float = STOP_TIMEOUT_S) -> int:
        """Have it end, and kill it after `limit_s`; return its exit code. Idempotent."""
        self.begin_stop()
        return self._wait_or_kill(limit_s)

    def log_tail(self) -> str:
        """Return the last lines of its log."""
        with self.log.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
            return b"\n".join(log.read().splitlines()[-_TAIL_LINES:]).decode(errors="replace")

    def _wait_or_kill(self, limit_s: float) -> int:
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return self.kill()

    def _launch(
        self, command: Sequence[str], environ: Mapping[str, str] | None = None, pass_fds: Sequence[int] = ()
    ) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environ,
                pass_fds=pass_fds,
                start_new_session=True,  # Ctrl-C reaches the tool, which then stops this process
            )


def stop_all(processes: Iterable[OwnedProcess]) -> None:
    """Stop them side by side."""
    stopping = list(processes)
    for process in stopping:
        process.begin_stop()
    for process in stopping:
        process.stop()
