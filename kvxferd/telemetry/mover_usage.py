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
    DIED_STARTING = "died-starting"  # before its agent was made
    DIED_UNASSIGNED = "died-unassigned"  # while it was kept ready for a registration


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


def read_usage(pid: int, proc: Path = Path("/proc")) -> ProcessUsage | None:
    """Return what a process has used; None where it is gone. Takes about 40 us."""
    try:
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        _, resident, shared, *_ = (proc / str(pid) / "statm").read_text().split()
    except (OSError, ValueError):
        return None
    ticks = [int(fields[index]) for index in (_UTIME, _STIME, _CUTIME, _CSTIME)]
    return ProcessUsage(
        cpu_s=(ticks[0] + ticks[1]) / _TICKS_PER_S,
        children_cpu_s=(ticks[2] + ticks[3]) / _TICKS_PER_S,
        memory_bytes=max(0, int(resident) - int(shared)) * _PAGE_BYTES,
    )


class MoverUsage:
    """Sums what the movers use. The processor time never falls: that of dead movers stays in it.

    The forkserver waits for each mover, so the kernel adds a dead mover's time to that of the forkserver's
    children. What was counted when a forkserver dies is kept here.
    """

    def __init__(self, read: Callable[[int], ProcessUsage | None] = read_usage) -> None:
        self._read = read
        self._forkserver: int | None = None
        self._before_s = 0.0  # of earlier forkservers and their movers
        self._cpu_s = 0.0

    def update(self, forkserver: int | None, pids: list[int]) -> tuple[float, int]:
        """Return seconds of processor time since the daemon began, and bytes of memory now."""
        if forkserver != self._forkserver:
            self._before_s, self._forkserver = self._cpu_s, forkserver
        parent = self._read(forkserver) if forkserver is not None else None
        if parent is None:
            return self._cpu_s, 0
        movers = [usage for pid in pids if (usage := self._read(pid)) is not None]
        now_s = parent.cpu_s + parent.children_cpu_s + sum(usage.cpu_s for usage in movers)
        # A mover that is dead and not waited for yet is in neither for a moment.
        self._cpu_s = max(self._cpu_s, self._before_s + now_s)
        return self._cpu_s, parent.memory_bytes + sum(usage.memory_bytes for usage in movers)


def read_waited_s(pid: int, proc: Path = Path("/proc")) -> float | None:
    """Return for how long a process's first thread, a mover's loop, was ready without a processor.

    None where it is gone, and where the kernel does not count.
    """
    try:
        return waited_s_of((proc / str(pid) / "schedstat").read_bytes())
    except OSError:
        return None


class MoverWaits:
    """Sums the movers' waits for a processor. What one waited after the last reading goes with it."""

    def __init__(self, read: Callable[[int], float | None] = read_waited_s) -> None:
        self._read = read
        self._last_s: dict[int, float] = {}  # by pid
        self._total_s = 0.0

    def update(self, pids: list[int]) -> float:
        """Return the seconds since the daemon began, over all movers."""
        before = self._last_s
        self._last_s = {pid: waited_s for pid in pids if (waited_s := self._read(pid)) is not None}
        for pid, waited_s in self._last_s.items():
            # A pid that was used again begins anew.
            self._total_s += max(0.0, waited_s - before.get(pid, 0.0))
        return self._total_s
