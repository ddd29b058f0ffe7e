"""Copies what the forkserver and its movers write to standard error into the daemon's own log."""

from __future__ import annotations

import asyncio
import logging
import os

from kvxferd.ucx_log import parse_line

_LOG = logging.getLogger(__name__)

READ_BYTES = 64 << 10
MAX_LINE_BYTES = 4 << 10  # enough for a traceback's line; a longer one is cut, and its rest is not kept


class StderrReader:
    """Reads a pipe until its last writer is gone. Transfer libraries write there without any format."""

    def __init__(self, pipe: int) -> None:
        """Take over the reading end."""
        os.set_blocking(pipe, False)
        self._pipe = pipe
        self._partial_line = b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pipe, self._read)

    def _read(self) -> None:
        try:
            chunk = os.read(self._pipe, READ_BYTES)
        except BlockingIOError:
            return
        *lines, rest = (self._partial_line + chunk).split(b"\n")
        for line in lines:
            self._log(line)
        self._partial_line = rest[:MAX_LINE_BYTES]
        if not chunk:
            self.close()

    def _log(self, line: bytes) -> None:
        text = line[:MAX_LINE_BYTES].decode(errors="replace").strip()
        ucx_line = parse_line(text)
        if ucx_line is not None and ucx_line.level == "INFO":
            _LOG.debug("%s", text)
        elif text:
            _LOG.warning("%s", text)

    def read_rest_and_close(self) -> None:
        """Read the rest and close: the forkserver is gone, and its movers with it."""
        for _ in range(16):
            if self._pipe >= 0:
                self._read()
        self.close()

    def close(self) -> None:
        """Stop reading. Idempotent."""
        if self._pipe < 0:
            return
        self._log(self._partial_line)
        self._loop.remove_reader(self._pipe)
        os.close(self._pipe)
        self._pipe = -1
