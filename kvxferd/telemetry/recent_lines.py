"""The last lines of the log, in bounded memory: for a support bundle, where standard error is gone."""

from __future__ import annotations

import threading
from collections import deque

# Ordinary lines have 300 bytes: ten minutes of five pulls a second. Errors have their own place, so that
# pulls do not push them out. 1.5 MiB in all, with Python's objects 2 MiB.
MAX_LINES, MAX_CHARS = 4_096, 1 << 20
MAX_ERROR_LINES, MAX_ERROR_CHARS = 512, 512 << 10
MAX_LINE_CHARS = 16 << 10  # a traceback


class _Ring:
    def __init__(self, max_lines: int, max_chars: int) -> None:
        self._max_lines, self._max_chars = max_lines, max_chars
        self._num_chars = 0
        self.lines: deque[str] = deque()

    def add(self, line: str) -> None:
        self.lines.append(line)
        self._num_chars += len(line)
        while len(self.lines) > self._max_lines or self._num_chars > self._max_chars:
            self._num_chars -= len(self.lines.popleft())


class RecentLines:
    """Keeps the last lines that were logged. Thread-safe."""

    def __init__(self) -> None:
        # Reentrant: a destructor that logs may run in the middle of `add`.
        self._lock = threading.RLock()
        self._ordinary = _Ring(MAX_LINES, MAX_CHARS)
        self._errors = _Ring(MAX_ERROR_LINES, MAX_ERROR_CHARS)

    def add(self, line: str, is_error: bool = False) -> None:
        """Keep a line; the oldest give way."""
        with self._lock:
            (self._errors if is_error else self._ordinary).add(line[:MAX_LINE_CHARS])

    def lines(self) -> list[str]:
        """Return the lines that are no errors, oldest first."""
        with self._lock:
            return list(self._ordinary.lines)

    def errors(self) -> list[str]:
        """Return the errors, oldest first."""
        with self._lock:
            return list(self._errors.lines)


RECENT_LINES = RecentLines()
