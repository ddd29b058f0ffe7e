"""RLIMIT_MEMLOCK: registering a cache with a network card locks all of its memory."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from kvxferd.doctor.finding import CheckContext, Finding, ok, warn
from kvxferd.doctor.network_cards import rdma_cards
from kvxferd.tooling.output import format_bytes


def check(node: CheckContext) -> Iterator[Finding]:
    """Check the limit that movers inherit. It does not apply to root with CAP_IPC_LOCK."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield ok("locked memory", "unlimited", limit=-1)
    elif _may_lock():
        yield ok("locked memory", f"limit {format_bytes(soft)}, and CAP_IPC_LOCK passes it", limit=soft)
    else:
        matters = "" if rdma_cards() else "; it matters once there is an RDMA card"
        yield warn(
            "locked memory",
            f"limit {format_bytes(soft)}: an RDMA card cannot register a cache larger than that{matters}",
            "raise it: LimitMEMLOCK=infinity in the unit, ulimit -l unlimited, or give CAP_IPC_LOCK",
            limit=soft,
        )


def _may_lock() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> 14 & 1)  # CAP_IPC_LOCK
    return False
