"""The cost of an idle node: CPU time and memory of its daemon and its movers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from kvxferd.bench.proc_stats import cpu_seconds, private_bytes, process_tree, resident_bytes

# Longer than a source goes on polling after it was read.
SETTLE_S = 5.0


@dataclass(frozen=True)
class Idle:
    """The results of one node, in bytes and seconds."""

    ranks: int
    seconds: float
    cpu_percent: float  # of one core: daemon, forkserver and movers together
    daemon_rss_bytes: int
    forkserver_rss_bytes: int
    forkserver_private_bytes: int
    mover_private_bytes: list[int]  # each, without the worker's memory that it maps


async def measure_idle(daemon_pid: int, ranks: int, seconds: float) -> Idle:
    """Measure a daemon of this machine and the processes that it started."""
    await asyncio.sleep(SETTLE_S)
    pids = process_tree(daemon_pid)
    before, began = {pid: cpu_seconds(pid) for pid in pids}, time.monotonic()
    await asyncio.sleep(seconds)
    elapsed = time.monotonic() - began
    used = {pid: cpu_seconds(pid) - before[pid] for pid in pids}
    _, parent, *movers = pids
    return Idle(
        ranks=ranks,
        seconds=elapsed,
        cpu_percent=100 * sum(used.values()) / elapsed,
        daemon_rss_bytes=resident_bytes(daemon_pid),
        forkserver_rss_bytes=resident_bytes(parent),
        forkserver_private_bytes=private_bytes(parent),
        mover_private_bytes=[private_bytes(pid) for pid in movers],
    )
