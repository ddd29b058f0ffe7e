"""The cost of an idle node: CPU time and memory of its daemon and its movers."""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvxferd.bench.cases import BLOCKS_PER_RUN, BlockPattern, Case
from kvxferd.bench.proc_stats import cpu_seconds, private_bytes, process_tree, resident_bytes
from kvxferd.bench.rank_process import BenchRank
from kvxferd.bench.shapes import BenchDeployment
from kvxferd.bench.testbed import RunningEngines

# Longer than a source goes on polling after it was read.
SETTLE_S = 5.0


@dataclass(frozen=True)
class Idle:
    """The results of one node, in bytes and seconds."""

    ranks: int
    seconds: float
    cpu_percent: float  # of one core: daemon, forkserver and movers together
    daemon_rss_bytes: int
    mover_private_bytes: list[int]  # each, without the worker's memory that it maps


def idle_deployment() -> BenchDeployment:
    """Return engines of eight ranks."""
    return BenchDeployment(name="eight", shape="llama-3-70b", layers=1, ranks=8, pool_blocks=BLOCKS_PER_RUN)


def measure_idle(pair: RunningEngines, seconds: float) -> Idle:
    """Measure the sink's daemon and the processes that it started. `pair`: of `idle_deployment`."""
    case = Case(deployment=pair.deployment, lists=BlockPattern.CONTIGUOUS, blocks=1)
    # Each rank pulls once, so that a peer is connected and every mover has read.
    batch = pair.publish(case, 1)
    pair.call_all("sink", BenchRank.pull_all, case, batch.refs)
    pair.release(batch)
    daemon_pid = pair.testbed.daemons["sink"].pid
    time.sleep(SETTLE_S)
    pids = process_tree(daemon_pid)
    before, began = {pid: cpu_seconds(pid) for pid in pids}, time.monotonic()
    time.sleep(seconds)
    elapsed = time.monotonic() - began
    used = {pid: cpu_seconds(pid) - before[pid] for pid in pids}
    _, _, *movers = pids  # the daemon, then its forkserver
    return Idle(
        ranks=len(pair.ranks),
        seconds=elapsed,
        cpu_percent=100 * sum(used.values()) / elapsed,
        daemon_rss_bytes=resident_bytes(daemon_pid),
        mover_private_bytes=[private_bytes(pid) for pid in movers],
    )
