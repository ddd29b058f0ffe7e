"""A tool's directory for daemons and logs."""

from __future__ import annotations

import tempfile
from pathlib import Path

# sockaddr_un holds 107 bytes; sockets in a longer directory would not fit.
MAX_TEMP_PATH = 60


def make_work_directory(prefix: str) -> Path:
    """Make a directory whose path is short enough for sockets; the caller removes it."""
    parent = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix=prefix, dir=parent if len(parent) < MAX_TEMP_PATH else "/tmp"))
