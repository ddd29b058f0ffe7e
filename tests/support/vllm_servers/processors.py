"""Keeps engines off one core, so that daemons, movers and the test itself are never starved by them.

vLLM's CPU workers spin and yield: two of them, of 49 threads each, kept every other process off two cores
for 10 to 50 s at a time (Linux 6.18), at any nice value and in any CPU cgroup. Daemons' timers and leases
stand still for as long, and deadlines pass. With the engines on one of the two cores nothing was late, and
24 tests took 4 minutes instead of 6.5.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessorShare:
    """The cores that engines run on, and the one that is kept from them; None where there is no second."""

    engines: frozenset[int]
    kept: int | None

    def __str__(self) -> str:
        if self.kept is None:
            return (
                "there is one core: engines share it with daemons and movers, which they may keep from it "
                "for 10 s and more, so that deadlines pass; use two cores for results that count"
            )
        cores = ",".join(map(str, sorted(self.engines)))
        return f"engines run on cores {cores}; core {self.kept} is kept for daemons, movers and the tests"


def share_processors(cores: Set[int]) -> ProcessorShare:
    """Return how `cores` are shared: the last one is kept from engines, unless it is the only one."""
    if len(cores) < 2:
        return ProcessorShare(frozenset(cores), None)
    kept = max(cores)
    return ProcessorShare(frozenset(cores) - {kept}, kept)


@contextmanager
def engine_processors() -> Iterator[ProcessorShare]:
    """What this thread starts inside the block runs on the engines' cores, from its first instruction.

    Linux keeps the cores of each thread, and a process inherits those of the thread that starts it. The
    other threads of this process, and this one after the block, keep all of theirs.
    """
    before = os.sched_getaffinity(0)
    share = share_processors(before)
    os.sched_setaffinity(0, share.engines)
    try:
        yield share
    finally:
        os.sched_setaffinity(0, before)
