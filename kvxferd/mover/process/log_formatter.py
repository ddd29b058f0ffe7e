"""How a mover and the forkserver write a log record: as one line.

They share a pipe, which the daemon reads line by line. A record may hold text of a peer or a library. So no
record may contain a line break, or be so long that other processes write into it.
"""

from __future__ import annotations

import logging

# The kernel keeps a write to a pipe whole up to 4,096 bytes.
HEAD_BYTES, TAIL_BYTES = 1000, 2500
_CONTROLS = {code: ascii(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)}


class OneLineFormatter(logging.Formatter):
    """Writes every record as one line, its traceback included. A long line loses its middle."""

    def format(self, record: logging.LogRecord) -> str:
        return _shortened(super().format(record).translate(_CONTROLS))


def _shortened(text: str) -> str:
    encoded = text.encode(errors="backslashreplace")
    if len(encoded) <= HEAD_BYTES + TAIL_BYTES:
        return encoded.decode()
    head, tail = encoded[:HEAD_BYTES], encoded[-TAIL_BYTES:]
    return f"{head.decode(errors='replace')} ... {tail.decode(errors='replace')}"
