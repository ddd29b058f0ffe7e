"""/dev/shm, which holds UCX's queues between processes of one node."""

from __future__ import annotations

import os
from collections.abc import Iterator

from kvxferd.doctor.finding import CheckContext, Finding, ok, warn
from kvxferd.tooling.output import format_bytes

SHM_DIR = "/dev/shm"
BYTES_PER_MOVER = 4 << 20  # UCX makes one file for each connected mover


def check(node: CheckContext) -> Iterator[Finding]:
    """Check its size, its free space, and whether this user may write to it."""
    place = node.environment.get("UCX_POSIX_DIR", SHM_DIR)
    needed = node.config.limits.max_ranks * BYTES_PER_MOVER
    todo = f"mount a tmpfs of {format_bytes(needed)} or more there (in a pod: an emptyDir of medium Memory)"
    try:
        status = os.statvfs(place)
    except OSError as error:
        yield warn("shared memory", f"{place}: {error.strerror}", todo)
        return
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    found = f"{place}: {format_bytes(size)}, {format_bytes(free)} free"
    if not os.access(place, os.W_OK | os.X_OK):
        yield warn("shared memory", f"{place} cannot be written by uid {os.geteuid()}", todo)
    elif free < needed:
        why = f"; {node.config.limits.max_ranks} ranks (limits.max_ranks) may need {format_bytes(needed)}"
        yield warn("shared memory", found + why, todo, size=size, free=free)
    else:
        yield ok("shared memory", found, size=size, free=free)
