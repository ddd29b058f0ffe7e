"""How a mover and the movers' parent write a record of their log: as one line that is nobody else's.

The daemon reads there, line by line, how UCX connects (see `core.lanes`), and believes a lost connection
by it. A record holds what a peer or a library has written. So no record may end its line before its end, be
taken for a line of UCX, or be so long that others write into it.
"""

from __future__ import annotations

import logging

from kvxferd.core.ucx_log import CONNECTED_MARK

# The kernel keeps a write to a pipe whole up to 4,096 bytes.
HEAD_BYTES, TAIL_BYTES = 1000, 2500
_CONTROLS = {code: ascii(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)}


class OneLineFormatter(logging.Formatter):
    """Every record is one line, its traceback included. Of a long one the middle is left out."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record).translate(_CONTROLS)
        return _shortened(text).replace(CONNECTED_MARK, "cfg_")


def _shortened(text: str) -> str:
    encoded = text.encode(errors="backslashreplace")
    if len(encoded) <= HEAD_BYTES + TAIL_BYTES:
        return encoded.decode()
    head, tail = encoded[:HEAD_BYTES], encoded[-TAIL_BYTES:]
    return f"{head.decode(errors='replace')} ... {tail.decode(errors='replace')}"
