"""The descriptors of the test's own process: what leaks is found by their number."""

from __future__ import annotations

import os


def num_open_fds() -> int:
    """Return how many descriptors are open, the one that reads the directory included."""
    return len(os.listdir("/proc/self/fd"))
