"""What UCX logs in this process: by which transports the mover has connected, and what that proves.

UCX writes to standard output. In a child mover that is a file in memory: unlike a pipe it loses no line,
however many there are, and the mover reads them when it must know. The forkserver makes the file, and copies
what a dead mover has left unread to standard error.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

from kvxferd.mover.backends import Backend
from kvxferd.mover.disconnects import transports_prove_over
from kvxferd.ucx_log import TransportsUsed, is_about_connection, parse_line, parse_transports

READ_BYTES = 64 << 10
MAX_LINE_BYTES = 16 << 10  # twice the longest that UCX writes

_STANDARD_ERROR = 2
_LIBC = ctypes.CDLL(None)
_FREE_PAGES = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


def open_output() -> tuple[int, int]:
    """Return two descriptors of a new file in memory: to write at its end, and to read. Raises OSError."""
    writing = os.memfd_create("kvxferd-output")
    try:
        return writing, os.open(f"/proc/self/fd/{writing}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        os.close(writing)
        raise


def copy_output(reading: int) -> Iterator[bytes]:
    """Copy what is unread to standard error, and yield it. Its memory is freed."""
    while text := os.read(reading, READ_BYTES):
        with contextlib.suppress(OSError):  # nobody reads it, or too slowly
            os.write(_STANDARD_ERROR, text)
        end = os.lseek(reading, 0, os.SEEK_CUR)
        _LIBC.fallocate(reading, _FREE_PAGES, ctypes.c_long(0), ctypes.c_long(end))
        yield text


class UcxLines:
    """The lines of one child mover about its connections. Another line only goes to standard error."""

    def __init__(self, reading: int, backend: Backend) -> None:
        self._reading = reading
        self._backend = backend
        self._used: list[TransportsUsed] = []
        self._num_taken = 0
        self._has_unknown = False  # a line about a connection cannot be parsed, or may be cut
        self._partial_line = b""

    def read(self) -> None:
        """Read what was logged until now."""
        for text in copy_output(self._reading):
            *lines, self._partial_line = (self._partial_line + text).split(b"\n")
            for line in lines:
                self._parse(line.decode(errors="replace"))
            if len(self._partial_line) > MAX_LINE_BYTES:
                self._has_unknown, self._partial_line = True, b""

    def take_new(self) -> list[TransportsUsed]:
        """Return the transports that were read and not taken yet."""
        new, self._num_taken = self._used[self._num_taken :], len(self._used)
        return new

    def prove_over(self) -> bool:
        """Whether no read is in flight any more on a connection that was just lost.

        UCX writes a connection's line before the first read over it, in this process. A line that is being
        written, or not understood, may be of any transport: then nothing is proved.
        """
        self.read()
        is_complete = not self._has_unknown and not self._partial_line
        return is_complete and transports_prove_over(self._backend, self._used)

    def _parse(self, text: str) -> None:
        if not is_about_connection(text):
            return
        line = parse_line(text.strip())
        used = parse_transports(line.text) if line is not None and line.level == "INFO" else None
        if used is None:  # an unknown version of UCX wrote it, or something else was written into it
            self._has_unknown = True
        elif used not in self._used:  # each connection has a line, and there are few kinds
            self._used.append(used)
