"""The last lines of the log in bounded memory, and the thread that writes them to standard error.

A pipe without a reader holds 64 KiB, and the next write to it blocks for ever. The event loop therefore
never writes: it appends a line here. `/v1/log` shows what is here, also where standard error is gone. A line
that gives way before it was written is counted. At exit the unwritten lines have `CLOSE_S`; nothing waits
longer for a reader.
"""

from __future__ import annotations

import io
import os
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress

from kvxferd.fd_wait import wait_writable
from kvxferd.telemetry.recent_entries import RecentEntries

# A line has 256 bytes on average, and about as many again as a Python object: 4 MiB in all, which is half a
# minute of 250 pulls a second. A reader that is away for longer than that loses the oldest of them.
MAX_LINES = 8_192
MAX_BYTES = 2 << 20
# Older errors stay to be shown, so that a flood of ordinary lines hides none.
MAX_ERROR_LINES = 1_024
MAX_ERROR_BYTES = 512 << 10
MAX_LINE_BYTES = 64 << 10  # a long traceback has 16 KiB; journald splits lines at 48 KiB
# PIPE_BUF: a pipe takes this much whole or not at all, so lines of two writers are never mixed.
WRITE_BYTES = 4_096
CLOSE_S = 1.0  # half of it for everything in order, half for the last lines
LAST_LINES = 64
PAUSE_S = 0.01  # in which lines that are no errors gather


class LogCounts:
    """How many lines this process did not log, for the metrics."""

    def __init__(self) -> None:
        self.dropped = 0  # they gave way unwritten, or standard error was closed
        self.suppressed = 0  # over a rate limit


LOG_COUNTS = LogCounts()


class LogBuffer:
    """The last lines of this process, and the last errors before them. Written once `start` was called."""

    def __init__(self, counts: LogCounts = LOG_COUNTS) -> None:
        self._fd = -1
        self._render_dropped: Callable[[int], str] = "{} log lines dropped".format
        self._counts = counts
        # Reentrant: a destructor that writes a warning may run in the middle of `put`.
        self._changed = threading.Condition(threading.RLock())
        self._lines = RecentEntries[bytes](MAX_LINES, MAX_BYTES, MAX_ERROR_LINES, MAX_ERROR_BYTES)
        self._next = 1  # the number of the line that is written next
        self._name = secrets.token_hex(4)
        self._num_unreported = 0  # lines dropped since the last report
        self._is_closing = False
        self._is_idle = False  # the writer waits for a line
        self._ended = threading.Event()

    def start(self, fd: int, render_dropped: Callable[[int], str]) -> None:
        """Write to the descriptor from now on. `render_dropped` formats the report of dropped lines."""
        self._fd, self._render_dropped = fd, render_dropped
        # A daemon thread, because an exit must not wait for a write that never returns.
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def put(self, line: str, is_error: bool = False) -> None:
        """Append a line without its newline. Thread-safe; never waits for the reader."""
        text = line.encode("utf-8", "backslashreplace")[: MAX_LINE_BYTES - 1] + b"\n"
        with self._changed:
            if self._ended.is_set():
                self._write_without_waiting(text)
                return
            self._give_up_to(self._lines.add(text, len(text), is_error))
            if is_error or self._is_idle:
                self._changed.notify()

    def lines(self, after: str = "") -> tuple[list[str], str]:
        """Return the lines after a cursor, oldest first, and a cursor for those after them.

        A cursor of another process, which numbers its lines by itself, is before the first.
        """
        name, _, number = after.partition("-")
        with self._changed:
            first = int(number) if name == self._name and number.isdecimal() else 0
            kept = [entry.item for entry in self._lines.all() if entry.number > first]
            return [text[:-1].decode(errors="replace") for text in kept], f"{self._name}-{self._lines.last}"

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Write the remaining lines, for at most `limit_s`. Idempotent."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._ended.wait(limit_s / 2):
            return
        with self._changed:
            self._give_up_to(self._lines.last - LAST_LINES)
        self._ended.wait(limit_s / 2)

    def _give_up_to(self, number: int) -> None:
        """Do not write the lines up to this one."""
        self._drop(max(0, number + 1 - self._next))
        self._next = max(self._next, number + 1)

    def _drop(self, num_lines: int) -> None:
        self._num_unreported += num_lines
        self._counts.dropped += num_lines

    # --- on the writer's thread

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            text, num_lines = batch
            if not self._write(text):
                with self._changed:
                    self._drop(num_lines)
            self._pause()
        with self._changed:
            self._ended.set()

    @property
    def _has_unwritten(self) -> bool:
        return self._next <= self._lines.last

    def _pause(self) -> None:
        """Let lines gather for a moment: waking up for each took longer than formatting it."""
        with self._changed:
            if not (self._is_closing or self._has_unwritten):
                self._changed.wait(PAUSE_S)

    def _next_batch(self) -> tuple[bytes, int] | None:
        """Wait for lines; return a batch, oldest first, and their number; None: it is closed and empty.

        How many lines were dropped stands before those that follow them.
        """
        with self._changed:
            while not self._has_unwritten:
                if self._is_closing:
                    return None
                self._is_idle = True
                self._changed.wait()
                self._is_idle = False
            text, first = b"", self._next
            if self._num_unreported:
                num_dropped, self._num_unreported = self._num_unreported, 0
                text = self._render_dropped(num_dropped).encode() + b"\n"
            while self._has_unwritten:
                line = self._lines.get(self._next)
                if text and len(text) + len(line) > WRITE_BYTES:
                    break
                text += line
                self._next += 1
            return text, self._next - first

    def _write(self, text: bytes) -> bool:
        """Write the whole text, however long that takes. False: the descriptor is closed or broken."""
        rest = memoryview(text)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:  # another process that shares it made it non-blocking
                wait_writable(self._fd)
            except OSError:
                return False
        return True

    def _write_without_waiting(self, text: bytes) -> None:
        """Write what the descriptor takes without waiting. Called after `close`."""
        with suppress(OSError):
            if wait_writable(self._fd, 0):
                os.write(self._fd, text[:WRITE_BYTES])


LOG_BUFFER = LogBuffer()


class StderrStream(io.TextIOBase):
    """`sys.stderr` for code that prints there directly: tracebacks, warnings, the command line."""

    def __init__(self, buffer: LogBuffer, *, is_terminal: bool) -> None:
        super().__init__()
        self._buffer = buffer
        self._is_terminal = is_terminal
        self._partial_line = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the buffer."""
        return "utf-8"

    def writable(self) -> bool:
        """Return True."""
        return True

    def isatty(self) -> bool:
        """Whether the descriptor is a terminal."""
        return self._is_terminal

    def write(self, text: str) -> int:
        """Put the whole lines; keep the rest until its newline comes."""
        *lines, rest = (self._partial_line + text).split("\n")
        if len(rest) > MAX_LINE_BYTES:
            lines, rest = [*lines, rest], ""
        self._partial_line = rest
        for line in lines:
            self._buffer.put(line, is_error=True)
        return len(text)

    def flush_partial_line(self) -> None:
        """Put a kept line that has no newline, if there is one."""
        if self._partial_line:
            self.write("\n")
