"""The loop of every process of the bench: a command on standard input, an answer on standard output."""

from __future__ import annotations

import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Protocol

from kvxferd.cli.bench import speech
from kvxferd.cli.tether import tether
from kvxferd.errors import KvxferdError

_READ_BYTES = 1 << 20


class Obedient(Protocol):
    """What a process does."""

    def obey(self, command: speech.Command) -> speech.Reply:
        """Do what is asked."""
        ...

    def attend(self) -> bool:
        """Do what is to be done between commands; False when there is nothing."""
        ...

    def close(self) -> None:
        """Leave."""
        ...


def serve(make: Callable[[], Obedient]) -> None:
    """Answer every command until standard input is closed; between commands attend, or sleep."""
    # SIGKILL, because one of these may be stopped, and would wait with any other.
    tether(signal.SIGKILL)
    # Transfer libraries print where answers go.
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    arrivals = select.poll()
    arrivals.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    process: Obedient | None = None
    pending = b""
    try:
        while True:
            while process is not None and process.attend() and not arrivals.poll(0):
                pass
            piece = os.read(sys.stdin.fileno(), _READ_BYTES)
            if not piece:
                return
            *lines, pending = (pending + piece).split(b"\n")
            for line in lines:
                try:
                    process = process or make()
                    reply = process.obey(speech.read_command(line))
                except KvxferdError as error:
                    reply = speech.Broken(message=f"{error.message} [{error.code.value}]")
                except Exception as error:
                    traceback.print_exc()
                    reply = speech.Broken(message=f"{type(error).__name__}: {error}")
                _write(answers, speech.to_line(reply))
    finally:
        if process is not None:
            process.close()


def _write(fd: int, line: bytes) -> None:
    while line:
        line = line[os.write(fd, line) :]
