"""Movers without a processor, movers that are stopped, and movers that crash again and again.

Pure: the caller reads /proc and the clock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvxferd.telemetry.warnings.kinds import WarningKind
from kvxferd.telemetry.warnings.warning_list import Finding

# Ready without a processor for a tenth of the time, and for half as long as it ran.
STARVED_SHARE = 0.1
CLEAR_SHARE = 0.05
STARVED_PER_RUN = 0.5
# Consecutive intervals, so that one burst of other work is none.
NUM_INTERVALS = 2

CRASHES = 3
CRASH_WINDOW_S = 60.0
# A loop of crashes has pauses, while an engine starts: it is over after this long without one.
CRASH_CLEAR_S = 120.0
MAX_ENGINES = 64


class MoverClocks(NamedTuple):
    """What the kernel counts of a mover's thread, in seconds since its start."""

    pid: int
    engine: str
    ran_s: float
    waited_s: float  # ready, without a processor


class _Interval(NamedTuple):
    clocks: MoverClocks
    at: float
    num_starved: int  # consecutive intervals


class StarvedMovers:
    """Compares two readings of each mover."""

    def __init__(self) -> None:
        self._last: dict[int, _Interval] = {}
        self._found: list[Finding] = []

    def update(self, readings: Iterable[MoverClocks], now: float) -> None:
        """Take over a reading of every mover; those that are missing are gone."""
        before, self._last = self._last, {}
        worst: dict[str, tuple[float, MoverClocks]] = {}
        for clocks in readings:
            last = before.get(clocks.pid)
            if last is None or clocks.ran_s < last.clocks.ran_s or now <= last.at:
                self._last[clocks.pid] = _Interval(clocks, now, 0)
                continue
            waited_s = clocks.waited_s - last.clocks.waited_s
            ran_s = clocks.ran_s - last.clocks.ran_s
            share = waited_s / (now - last.at)
            limit = CLEAR_SHARE if last.num_starved >= NUM_INTERVALS else STARVED_SHARE
            is_starved = share >= limit and waited_s >= STARVED_PER_RUN * ran_s
            num_starved = last.num_starved + 1 if is_starved else 0
            self._last[clocks.pid] = _Interval(clocks, now, num_starved)
            if num_starved >= NUM_INTERVALS and share > worst.get(clocks.engine, (0.0, clocks))[0]:
                worst[clocks.engine] = share, clocks
        self._found = [_starved(share, clocks) for share, clocks in worst.values()]

    def findings(self) -> list[Finding]:
        """Return one finding for each engine whose movers have no processor."""
        return self._found


def stopped_movers(engines_by_pid: Mapping[int, str], stats: Mapping[int, bytes]) -> list[Finding]:
    """Return one finding for each engine with a stopped mover. `stats`: each one's /proc/PID/stat."""
    found = {}
    for pid, engine in engines_by_pid.items():
        # The name before the state is in parentheses, and may hold any character.
        state = stats.get(pid, b"").rpartition(b")")[2].split()[:1]
        if state in ([b"T"], [b"t"]) and engine not in found:
            found[engine] = Finding(
                WarningKind.MOVER_STOPPED,
                engine,
                f"a mover of engine {engine} (pid {pid}) is stopped: pulls that need it pass their deadline",
                f"see what stopped it, a debugger or a signal, and continue it: kill -CONT {pid}",
            )
    return list(found.values())


class CrashingMovers:
    """Counts the movers that ended although nothing had ended them."""

    def __init__(self) -> None:
        self._crashes: OrderedDict[str, deque[float]] = OrderedDict()
        self._warned: set[str] = set()

    def record(self, engine: str, now: float) -> None:
        """Count a mover of that engine; "": one that had none yet."""
        if engine not in self._crashes and len(self._crashes) >= MAX_ENGINES:
            forgotten, _ = self._crashes.popitem(last=False)
            self._warned.discard(forgotten)
        self._crashes.setdefault(engine, deque(maxlen=64)).append(now)
        self._crashes.move_to_end(engine)

    def findings(self, now: float) -> list[Finding]:
        """Return one finding for each engine whose movers crash."""
        found = []
        for engine, times in list(self._crashes.items()):
            while times and now - times[0] > CRASH_CLEAR_S:
                times.popleft()
            if not times:
                del self._crashes[engine]
                self._warned.discard(engine)
                continue
            num_recent = sum(now - at <= CRASH_WINDOW_S for at in times)
            if num_recent >= CRASHES:
                self._warned.add(engine)
            if engine in self._warned:
                found.append(_crashing(engine, times, now))
        return found


def _starved(share: float, clocks: MoverClocks) -> Finding:
    message = (
        f"a mover of engine {clocks.engine} (pid {clocks.pid}) has no processor for {share:.0%} of the time"
        if clocks.engine
        else f"a mover without a rank (pid {clocks.pid}) has no processor for {share:.0%} of the time"
    )
    remedy = (
        "hold the engines to fewer processors (taskset, cpusets, AllowedCPUs=), or raise the daemon's CPU "
        "limit: docs/how-to/processors.md"
    )
    return Finding(WarningKind.MOVER_STARVED, clocks.engine, message, remedy)


def _crashing(engine: str, times: deque[float], now: float) -> Finding:
    whose = f"of engine {engine}" if engine else "that had no rank yet"
    message = (
        f"movers {whose} crash: {len(times)} in the last {CRASH_CLEAR_S:.0f} s, "
        f"the last {now - times[-1]:.0f} s ago"
    )
    remedy = (
        "look for `mover died` and the lines before it in the daemon's log, and in the kernel's log for lack "
        "of memory"
    )
    return Finding(WarningKind.MOVER_CRASHES, engine, message, remedy)


def parse_schedstat(text: bytes) -> tuple[float, float] | None:
    """Return the seconds run and waited of a schedstat file; None where the kernel does not count."""
    try:
        ran_ns, waited_ns, num_turns = map(int, text.split())
    except ValueError:
        return None
    return (ran_ns / 1e9, waited_ns / 1e9) if ran_ns or waited_ns or num_turns else None


def clocks_of(engines_by_pid: Mapping[int, str], schedstats: Mapping[int, bytes]) -> list[MoverClocks]:
    """Return the clocks of the movers whose file could be read."""
    found = []
    for pid, engine in engines_by_pid.items():
        if pid in schedstats and (seconds := parse_schedstat(schedstats[pid])) is not None:
            found.append(MoverClocks(pid, engine, *seconds))
    return found
