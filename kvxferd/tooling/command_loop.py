"""The loop of a child process that a `CommandProcess` starts: it reads commands and writes replies."""

from __future__ import annotations

import os
import select
import sys
import traceback
from collections.abc import Callable
from typing import Protocol, TypeVar

from kvxferd.errors import KvxferdError
from kvxferd.tooling.line_protocol import LineProtocol, encode_line

C_contra = TypeVar("C_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)

_READ_BYTES = 1 << 20


class CommandHandler(Protocol[C_contra, R_co]):
    """Handles the commands of one process."""

    def handle(self, command: C_contra) -> R_co:
        """Handle one command and return its reply."""
        ...

    def progress(self) -> bool:
        """Do the work between commands; return False if there is none."""
        ...

    def close(self) -> None:
        """Release what the handler holds; called at the end."""
        ...


def serve_commands(
    protocol: LineProtocol[C_contra, R_co], make: Callable[[], CommandHandler[C_contra, R_co]]
) -> None:
    """Handle every command until standard input is closed; in between make progress, or sleep."""
    # Transfer libraries print to standard output, so replies go to a duplicate of it.
    replies = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    arrivals = select.poll()
    arrivals.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    process: CommandHandler[C_contra, R_co] | None = None
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
                    reply = encode_line(process.handle(protocol.decode_command(line)))
                except KvxferdError as error:
                    reply = protocol.encode_failure(f"{error.message} [{error.code.value}]")
                except Exception as error:
                    traceback.print_exc()
                    reply = protocol.encode_failure(f"{type(error).__name__}: {error}")
                _write_all(replies, reply)
    finally:
        if process is not None:
            process.close()


def _write_all(fd: int, line: bytes) -> None:
    while line:
        line = line[os.write(fd, line) :]
