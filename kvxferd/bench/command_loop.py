"""The loop of a bench process: it reads commands from standard input and writes replies."""

from __future__ import annotations

import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Protocol

from kvxferd.bench import protocol
from kvxferd.errors import KvxferdError
from kvxferd.tooling.die_with_parent import die_with_parent

_READ_BYTES = 1 << 20


class CommandHandler(Protocol):
    """Handles the commands of one process."""

    def handle(self, command: protocol.Command) -> protocol.Reply:
        """Handle one command and return its reply."""
        ...

    def progress(self) -> bool:
        """Do the work between commands; return False if there is none."""
        ...

    def close(self) -> None:
        """Release what the handler holds; called at the end."""
        ...


def serve_commands(make: Callable[[], CommandHandler]) -> None:
    """Handle every command until standard input is closed; in between make progress, or sleep."""
    # SIGKILL, because a process that is stopped (SIGSTOP) would not act on any other signal.
    die_with_parent(signal.SIGKILL)
    # Transfer libraries print to standard output, so replies go to a duplicate of it.
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    arrivals = select.poll()
    arrivals.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    process: CommandHandler | None = None
    pending = b""
    try:
        while True:
            while process is not None and process.progress() and not arrivals.poll(0):
                pass
            piece = os.read(sys.stdin.fileno(), _READ_BYTES)
            if not piece:
                return
            *lines, pending = (pending + piece).split(b"\n")
            for line in lines:
                try:
                    process = process or make()
                    reply = process.handle(protocol.decode_command(line))
                except KvxferdError as error:
                    reply = protocol.CommandFailed(message=f"{error.message} [{error.code.value}]")
                except Exception as error:
                    traceback.print_exc()
                    reply = protocol.CommandFailed(message=f"{type(error).__name__}: {error}")
                _write_all(answers, protocol.encode_line(reply))
    finally:
        if process is not None:
            process.close()


def _write_all(fd: int, line: bytes) -> None:
    while line:
        line = line[os.write(fd, line) :]
