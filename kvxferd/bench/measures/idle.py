"""The cost of an idle node: CPU time and memory of its daemon and its movers."""

from __future__ import annotations

import time
from collections.abc import Iterator

from kvxferd.bench.cases import BLOCKS_PER_RUN, BlockPattern, Case, equal_engines
from kvxferd.bench.figures import Finding, at_most
from kvxferd.bench.proc_stats import cpu_seconds, private_bytes, process_tree, resident_bytes
from kvxferd.bench.rank import BenchRank
from kvxferd.bench.testbed import Site, Testbed
from kvxferd.bench.workload import Workload

NUM_RANKS = 8
# Longer than a source goes on polling after it was read.
SETTLE_S = 5.0
_MB = 1e6


def measure_idle(site: Site, workload: Workload) -> Iterator[Finding]:
    """Measure the daemon of the engine that pulls, and the processes that it started."""
    pair = equal_engines("idle", "llama-3-70b", 1, BLOCKS_PER_RUN, ranks=NUM_RANKS)
    with Testbed.open(site) as testbed, testbed.engines(pair) as engines:
        # Each rank pulls once, so that a peer is connected and every mover has read.
        batch = engines.publish(Case(pair, BlockPattern.CONTIGUOUS, 1), 1)
        engines.call_all("decode", BenchRank.pull_all, batch)
        engines.release(batch)
        daemon_pid = testbed.daemons["decode"].pid
        time.sleep(SETTLE_S)
        pids = process_tree(daemon_pid)
        before, began = [cpu_seconds(pid) for pid in pids], time.monotonic()
        time.sleep(workload.idle_s)
        elapsed = time.monotonic() - began
        used = sum(map(cpu_seconds, pids)) - sum(before)
        rss = resident_bytes(daemon_pid)
        movers = [private_bytes(pid) for pid in pids[2:]]  # behind the daemon and its forkserver
    how = f"{NUM_RANKS} ranks registered, a peer connected, idle for {elapsed:.0f} s"
    title = "idle processor time, daemon and movers"
    yield at_most("idle_cpu_percent", title, 100 * used / elapsed, 1, how, "%")
    yield at_most("daemon_rss_mb", "daemon, resident", rss / _MB, 80, how, "MB")
    how = f"the largest of {len(movers)}, without the workers' memory that they map; {how}"
    yield at_most("mover_private_mb", "a mover, private", max(movers) / _MB, 40, how, "MB")
