"""TCP ports for servers that bind them by number.

A port that the kernel chose may be an outgoing connection's before the server binds it. So these are
below the kernel's own range, and each worker of pytest-xdist has a thousand of its own.
"""

from __future__ import annotations

import itertools
import os
import socket

FIRST = 20_000
PER_WORKER = 1_000
NUM_WORKERS = 12  # up to 32,000; the kernel's own range begins at 32,768
# Runs on one machine at the same time begin at different places.
_OFFSETS = itertools.count(os.getpid())


def free_port() -> int:
    """Return a port that nobody is bound to, and that this process returns once in a thousand calls."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % NUM_WORKERS
    for offset in itertools.islice(_OFFSETS, PER_WORKER):
        port = FIRST + PER_WORKER * worker + offset % PER_WORKER
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
    raise AssertionError(f"no port of {PER_WORKER} is free")
