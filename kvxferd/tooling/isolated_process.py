"""Runs part of a check in a child process with a deadline, so that a crash or hang ends only that."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kvxferd.die_with_parent import module_command

EXIT_TIMEOUT_S = 5.0
_ERROR_CHARS = 300


class IsolatedResult(NamedTuple):
    """The outcome of an isolated process."""

    value: Any  # its last line of output, decoded from JSON; None if there is none
    failure: str  # why there is no value; "" if there is one
    stderr: str  # everything that it wrote to standard error


class IsolatedProcess:
    """One process that runs a module, with pipes to it. `finish` kills it with its children."""

    def __init__(self, module: str, flags: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            module_command(module, *flags),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,  # so that its children can be killed with it
        )
        self._output = b""
        self._errors = b""

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def read_first_line(self, limit_s: float) -> IsolatedResult:
        """Return the first line that it prints; it goes on running. Standard error comes with `finish`."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._output:
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return IsolatedResult(None, f"it said nothing for {limit_s:g} s", "")
            if not (chunk := os.read(fd, 1 << 20)):
                return self.finish(EXIT_TIMEOUT_S)
            self._output += chunk
        try:
            return IsolatedResult(msgspec.json.decode(self._output.split(b"\n")[0]), "", "")
        except msgspec.DecodeError as error:
            return IsolatedResult(None, f"its first line is not JSON: {error}", "")

    def finish(self, limit_s: float, stdin: bytes = b"") -> IsolatedResult:
        """Write `stdin` to its standard input, close that, and wait for its end; kill it after `limit_s`."""
        try:
            output, errors = self._process.communicate(stdin, timeout=limit_s)
            late = ""
        except subprocess.TimeoutExpired:
            self._kill()
            output, errors = self._process.communicate()
            late = f"it has not ended within {limit_s:g} s"
        finally:
            self._kill()
        self._output += output
        self._errors += errors
        text = self._errors.decode(errors="replace")
        lines = self._output.splitlines()
        with contextlib.suppress(msgspec.DecodeError):
            if not late and lines and self._process.returncode == 0:
                return IsolatedResult(msgspec.json.decode(lines[-1]), "", text)
        return IsolatedResult(None, late or _failure_reason(self._process.returncode, text), text)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


def run_isolated(
    module: str, flags: Sequence[str], environment: Mapping[str, str], limit_s: float, stdin: bytes = b""
) -> IsolatedResult:
    """Run a module to its end. Its last line of output is its value."""
    return IsolatedProcess(module, flags, environment).finish(limit_s, stdin)


def _failure_reason(status: int, errors: str) -> str:
    """Return why a process printed no value: its last line of standard error, or the signal."""
    if status < 0:
        return f"it was killed by {signal.Signals(-status).name}"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return lines[-1][:_ERROR_CHARS] if lines else f"it ended with status {status} and said nothing"
