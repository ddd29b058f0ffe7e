"""Copies what the forkserver and its movers write to standard error into the daemon's own log."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import struct
import termios
from collections.abc import Callable

from kvxferd.ucx_log import UcxLine, is_about_connection, parse_line

_LOG = logging.getLogger(__name__)

READ_BYTES = 64 << 10
MAX_LINE_BYTES = 4 << 10  # enough for a traceback's line; a longer one is cut, and its rest is not kept


class StderrReader:
    """Reads a pipe until its last writer is gone. Transfer libraries write there without any format."""

    def __init__(
        self, pipe: int, on_ucx_line: Callable[[UcxLine], None], on_loss: Callable[[], None] = lambda: None
    ) -> None:
        """Take over the reading end. `on_ucx_line` gets UCX's lines of level INFO; the rest are warnings.

        `on_loss` is called where the pipe was so full that lines may be lost.
        """
        self._on_ucx_line = on_ucx_line
        self._on_loss = on_loss
        self._capacity = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
        os.set_blocking(pipe, False)
        self._pipe = pipe
        self._partial_line = b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pipe, self._read)

    def read_available(self) -> None:
        """Read all that was written before this call."""
        left = self._num_unread_bytes()
        while left > 0 and self._pipe >= 0:
            self._read()
            left -= READ_BYTES

    def _num_unread_bytes(self) -> int:
        if self._pipe < 0:
            return 0
        return int(struct.unpack("i", fcntl.ioctl(self._pipe, termios.FIONREAD, bytes(4)))[0])

    def _read(self) -> None:
        # A line that does not fit into the rest of a page begins another: a pipe may be full at half its
        # capacity.
        if self._num_unread_bytes() > self._capacity // 4:
            self._on_loss()
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
            self._on_ucx_line(ucx_line)
            return
        if is_about_connection(text):
            self._on_loss()  # its process cannot be read: something else was written into the line
        if text:
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
