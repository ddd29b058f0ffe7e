"""A verb on a terminal of a given size: what it writes, byte for byte."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

DEADLINE_S = 60.0


class Terminal:
    """A process whose standard output is a terminal."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process = process
        self._fd = fd
        self.written = ""

    def read_until(self, text: str, count: int = 1) -> str:
        """Return what was written, once it has `text` so often."""
        self._read(lambda: self.written.count(text) >= count)
        assert self.written.count(text) >= count, self.written
        return self.written

    def read_to_end(self) -> str:
        """Return what was written until the process ended."""
        self._read(lambda: False)
        self.process.wait(DEADLINE_S)
        return self.written

    def type(self, keys: str) -> None:
        """Press these keys."""
        os.write(self._fd, keys.encode())

    def interrupt(self) -> int:
        """Send SIGINT, as Ctrl-C does, and return the exit status."""
        self.process.send_signal(signal.SIGINT)
        self.read_to_end()
        return self.process.returncode

    def _read(self, is_enough) -> None:  # type: ignore[no-untyped-def]
        deadline = time.monotonic() + DEADLINE_S
        while not is_enough() and time.monotonic() < deadline:
            if not select.select([self._fd], [], [], deadline - time.monotonic())[0]:
                break
            try:
                received = os.read(self._fd, 1 << 16)
            except OSError:  # EIO: the other end is closed
                return
            if not received:
                return
            self.written += received.decode()


@contextmanager
def on_terminal(
    arguments: list[str], columns: int, lines: int = 1000, environ: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """Run `kvxferd` with these arguments on a terminal of that size; it is killed at the end."""
    ours, theirs = pty.openpty()
    # Line ends stay as they are.
    modes = termios.tcgetattr(theirs)
    modes[1] &= ~termios.OPOST
    termios.tcsetattr(theirs, termios.TCSANOW, modes)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    inherited = {
        name: os.environ[name] for name in os.environ if name not in ("COLUMNS", "LINES", "NO_COLOR")
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "kvxferd.cli", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**inherited, "TERM": "xterm-256color", **(environ or {})},
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
