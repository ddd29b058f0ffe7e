"""What the movers' parent and its movers write to standard error, as lines of the daemon's own log."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from kvxferd.core.lanes import UcxLine, parse_line

_LOG = logging.getLogger(__name__)

READ_BYTES = 64 << 10
MAX_LINE_BYTES = 4 << 10  # a traceback's line; what is longer is cut, what never ends is not kept


class Complaints:
    """Reads a pipe until its last writer is gone. Transfer libraries write there as they please."""

    def __init__(self, pipe: int, on_ucx: Callable[[UcxLine], None]) -> None:
        """Take over the reading end. `on_ucx` gets what UCX says for information; the rest are warnings."""
        self._on_ucx = on_ucx
        os.set_blocking(pipe, False)
        self._pipe = pipe
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pipe, self._read)

    def _read(self) -> None:
        try:
            chunk = os.read(self._pipe, READ_BYTES)
        except BlockingIOError:
            return
        *lines, rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._log(line)
        self._rest = rest[:MAX_LINE_BYTES]
        if not chunk:
            self.close()

    def _log(self, line: bytes) -> None:
        text = line[:MAX_LINE_BYTES].decode(errors="replace").strip()
        said = parse_line(text)
        if said is not None and said.level == "INFO":
            _LOG.debug("%s", text)
            self._on_ucx(said)
        elif text:
            _LOG.warning("%s", text)

    def drain(self) -> None:
        """Take what is there and stop: the parent is gone, and its movers with it."""
        for _ in range(16):
            if self._pipe >= 0:
                self._read()
        self.close()

    def close(self) -> None:
        """Stop reading. Idempotent."""
        if self._pipe < 0:
            return
        self._log(self._rest)
        self._loop.remove_reader(self._pipe)
        os.close(self._pipe)
        self._pipe = -1
