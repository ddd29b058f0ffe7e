"""What the movers of a node use: their number, why they ended, their processor time and memory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from kvxferd.telemetry.late_timers import waited_s_of

MOVER_STATES = ("starting", "ready", "assigned")

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Fields of /proc/PID/stat after the name in parentheses: utime, stime, and those of children waited for.
_UTIME, _STIME, _CUTIME, _CSTIME = 11, 12, 13, 14


class MoverExit(StrEnum):
    """Why a mover's process ended."""

    REQUESTED = "requested"  # the daemon ended it: its rank left or slept, or it was replaced
    WORKER_GONE = "worker-gone"  # its worker died first
    DIED = "died"  # nothing had ended it


class MoverReading(NamedTuple):
    """The movers at one moment."""

    num_by_state: dict[str, int]  # child movers, by MOVER_STATES
    exits: Counter[MoverExit]  # since the daemon began
    forkserver_pid: int | None
    pids: list[int]  # of child movers


NO_MOVERS = MoverReading({}, Counter(), None, [])


class ProcessUsage(NamedTuple):
    """What one process has used."""

    cpu_s: float
    children_cpu_s: float  # of its children that it has waited for
    memory_bytes: int  # resident, without files and shared memory
    waited_s: float = 0.0  # how long its first thread, a mover's loop, was ready without a processor


def read_usage(pid: int, proc: Path = Path("/proc")) -> ProcessUsage | None:
    """Return what a process has used; None where it is gone. Takes about 60 us."""
    try:
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        _, resident, shared, *_ = (proc / str(pid) / "statm").read_text().split()
        waited_s = waited_s_of((proc / str(pid) / "schedstat").read_bytes())
    except (OSError, ValueError):
        return None
    ticks = [int(fields[index]) for index in (_UTIME, _STIME, _CUTIME, _CSTIME)]
    return ProcessUsage(
        cpu_s=(ticks[0] + ticks[1]) / _TICKS_PER_S,
        children_cpu_s=(ticks[2] + ticks[3]) / _TICKS_PER_S,
        memory_bytes=max(0, int(resident) - int(shared)) * _PAGE_BYTES,
        waited_s=waited_s or 0.0,
    )


class MoverUsage:
    """Sums what the movers use. Neither sum of times falls.

    The forkserver waits for each mover, so the kernel adds a dead mover's processor time to that of the
    forkserver's children; what was counted when a forkserver dies is kept here. What a mover waited for a
    processor after the last reading goes with it.
    """

    def __init__(self, read: Callable[[int], ProcessUsage | None] = read_usage) -> None:
        self._read = read
        self._forkserver: int | None = None
        self._before_s = 0.0  # of earlier forkservers and their movers
        self._last_waits_s: dict[int, float] = {}  # by pid
        self.cpu_s = 0.0  # since the daemon began
        self.waited_s = 0.0
        self.memory_bytes = 0  # now

    def update(self, forkserver: int | None, pids: list[int]) -> None:
        """Read what these processes use now."""
        movers = {pid: usage for pid in pids if (usage := self._read(pid)) is not None}
        before, self._last_waits_s = self._last_waits_s, {pid: of.waited_s for pid, of in movers.items()}
        for pid, waited_s in self._last_waits_s.items():
            # A pid that was used again begins anew.
            self.waited_s += max(0.0, waited_s - before.get(pid, 0.0))
        if forkserver != self._forkserver:
            self._before_s, self._forkserver = self.cpu_s, forkserver
        parent = self._read(forkserver) if forkserver is not None else None
        if parent is None:
            self.memory_bytes = 0
            return
        now_s = parent.cpu_s + parent.children_cpu_s + sum(usage.cpu_s for usage in movers.values())
        # A mover that is dead and not waited for yet is in neither for a moment.
        self.cpu_s = max(self.cpu_s, self._before_s + now_s)
        self.memory_bytes = parent.memory_bytes + sum(usage.memory_bytes for usage in movers.values())
