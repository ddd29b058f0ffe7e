"""A bounded queue in front of standard error, written by a thread of its own.

A pipe without a reader holds 64 KiB, and the next write to it blocks for ever. The event loop therefore
never writes: it appends a line here. If the reader is too slow, the oldest ordinary lines are dropped and
counted, errors last. At exit the remaining lines have `CLOSE_S`; nothing waits longer for a reader.
"""

from __future__ import annotations

import io
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

# A line has 256 bytes on average, and about as many again as a Python object: 8 MiB in all, which is a
# minute of 250 pulls a second. A reader that is away for longer than that loses the oldest of them.
MAX_LINES = 16_384
MAX_BYTES = 4 << 20
# Errors have their own queue, so that a flood of ordinary lines drops none.
MAX_ERROR_LINES = 1_024
MAX_ERROR_BYTES = 512 << 10
MAX_LINE_BYTES = 64 << 10  # a long traceback has 16 KiB; journald splits lines at 48 KiB
# PIPE_BUF: a pipe takes this much whole or not at all, so lines of two writers are never mixed.
WRITE_BYTES = 4_096
CLOSE_S = 1.0  # half of it for everything in order, half for the errors and the last lines
LAST_LINES = 64
PAUSE_S = 0.01  # in which lines that are no errors gather
REPORT_S = 10.0  # between two reports of dropped lines, while the reader stays slow


class LogCounts:
    """How many lines this process did not log, for the metrics."""

    def __init__(self) -> None:
        self.dropped = 0  # the queue was full, or standard error was closed
        self.suppressed = 0  # over a rate limit


LOG_COUNTS = LogCounts()


class _Line(NamedTuple):
    number: int
    text: bytes


class _BoundedLines:
    """A bounded queue of lines; the oldest are dropped first."""

    def __init__(self, max_lines: int, max_bytes: int) -> None:
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self.lines: deque[_Line] = deque()

    def add(self, line: _Line) -> int:
        """Append a line; return how many were dropped to make room."""
        self.lines.append(line)
        self._num_bytes += len(line.text)
        num_dropped = 0
        while len(self.lines) > self._max_lines or self._num_bytes > self._max_bytes:
            self.pop_oldest()
            num_dropped += 1
        return num_dropped

    def pop_oldest(self) -> bytes:
        """Remove and return the oldest line."""
        text = self.lines.popleft().text
        self._num_bytes -= len(text)
        return text

    def keep_last(self, num_lines: int) -> int:
        """Remove all but the last `num_lines`; return how many were removed."""
        num_dropped = max(0, len(self.lines) - num_lines)
        for _ in range(num_dropped):
            self.pop_oldest()
        return num_dropped

    @property
    def is_half_empty(self) -> bool:
        """Whether the reader has caught up."""
        return 2 * len(self.lines) <= self._max_lines and 2 * self._num_bytes <= self._max_bytes


class LogQueue:
    """Lines to be written to a descriptor. `render_dropped` formats the report of dropped lines."""

    def __init__(
        self,
        fd: int,
        render_dropped: Callable[[int], str] = "{} log lines dropped".format,
        counts: LogCounts = LOG_COUNTS,
    ) -> None:
        self._fd = fd
        self.render_dropped = render_dropped
        self._counts = counts
        # Reentrant: a destructor that writes a warning may run in the middle of `put`.
        self._changed = threading.Condition(threading.RLock())
        self._ordinary = _BoundedLines(MAX_LINES, MAX_BYTES)
        self._errors = _BoundedLines(MAX_ERROR_LINES, MAX_ERROR_BYTES)
        self._next_number = 0
        self._num_unreported = 0  # lines dropped since the last report
        self._reported_at = 0.0
        self._was_written = True  # whether the descriptor took the last batch
        self._is_closing = False
        self._is_idle = False  # the writer waits for a line
        self._ended = threading.Event()
        # A daemon thread, because an exit must not wait for a write that never returns.
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def put(self, line: str, is_error: bool = False) -> None:
        """Append a line without its newline. Thread-safe; never waits for the reader."""
        text = line.encode("utf-8", "backslashreplace")[: MAX_LINE_BYTES - 1] + b"\n"
        with self._changed:
            if self._ended.is_set():
                self._write_without_waiting(text)
                return
            self._next_number += 1
            lines = self._errors if is_error else self._ordinary
            self._drop(lines.add(_Line(self._next_number, text)))
            if is_error or self._is_idle:
                self._changed.notify()

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Write the remaining lines, for at most `limit_s`. Idempotent."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._ended.wait(limit_s / 2):
            return
        with self._changed:
            self._drop(self._ordinary.keep_last(LAST_LINES))
        self._ended.wait(limit_s / 2)

    def _drop(self, num_lines: int) -> None:
        self._num_unreported += num_lines
        self._counts.dropped += num_lines

    # --- on the writer's thread

    def _run(self) -> None:
        while (text := self._next_batch()) is not None:
            self._was_written = self._write(text)
            if not self._was_written:
                with self._changed:
                    self._drop(text.count(b"\n"))
            self._pause()
        with self._changed:
            self._ended.set()

    def _pause(self) -> None:
        """Let lines gather for a moment: waking up for each took longer than formatting it."""
        with self._changed:
            if not (self._is_closing or self._errors.lines or self._ordinary.lines):
                self._changed.wait(PAUSE_S)

    def _next_batch(self) -> bytes | None:
        """Wait for lines; return a batch, oldest first, or None once the queue is closed and empty."""
        with self._changed:
            while not (self._errors.lines or self._ordinary.lines):
                if self._is_closing and self._num_unreported and self._was_written:
                    return self._report()
                if self._is_closing:
                    return None
                self._is_idle = True
                self._changed.wait()
                self._is_idle = False
            if self._is_report_due():
                return self._report()
            text = self._oldest().pop_oldest()
            while (lines := self._oldest()).lines and len(text) + len(lines.lines[0].text) <= WRITE_BYTES:
                text += lines.pop_oldest()
            return text

    def _oldest(self) -> _BoundedLines:
        if not self._ordinary.lines:
            return self._errors
        if not self._errors.lines:
            return self._ordinary
        return min(self._errors, self._ordinary, key=lambda lines: lines.lines[0].number)

    def _is_report_due(self) -> bool:
        if (
            not self._num_unreported or not self._was_written
        ):  # without a reader the report would be dropped too
            return False
        return self._ordinary.is_half_empty or time.monotonic() - self._reported_at > REPORT_S

    def _report(self) -> bytes:
        num_dropped, self._num_unreported = self._num_unreported, 0
        self._reported_at = time.monotonic()
        return self.render_dropped(num_dropped).encode() + b"\n"

    def _write(self, text: bytes) -> bool:
        """Write the whole text, however long that takes. False: the descriptor is closed or broken."""
        rest = memoryview(text)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:  # another process that shares it made it non-blocking
                poller = select.poll()
                poller.register(self._fd, select.POLLOUT)
                poller.poll()
            except OSError:
                return False
        return True

    def _write_without_waiting(self, text: bytes) -> None:
        """Write what the descriptor takes without waiting. Called after `close`."""
        poller = select.poll()
        with suppress(OSError):
            poller.register(self._fd, select.POLLOUT)
            if poller.poll(0):
                os.write(self._fd, text[:WRITE_BYTES])


class StderrStream(io.TextIOBase):
    """`sys.stderr` for code that prints there directly: tracebacks, warnings, the command line."""

    def __init__(self, queue: LogQueue, *, is_terminal: bool) -> None:
        super().__init__()
        self._queue = queue
        self._is_terminal = is_terminal
        self._partial_line = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the queue."""
        return "utf-8"

    def writable(self) -> bool:
        """Return True."""
        return True

    def isatty(self) -> bool:
        """Whether the descriptor is a terminal."""
        return self._is_terminal

    def write(self, text: str) -> int:
        """Queue the whole lines; keep the rest until its newline comes."""
        *lines, rest = (self._partial_line + text).split("\n")
        if len(rest) > MAX_LINE_BYTES:
            lines, rest = [*lines, rest], ""
        self._partial_line = rest
        for line in lines:
            self._queue.put(line, is_error=True)
        return len(text)

    def flush_partial_line(self) -> None:
        """Queue a kept line that has no newline, if there is one."""
        if self._partial_line:
            self.write("\n")
