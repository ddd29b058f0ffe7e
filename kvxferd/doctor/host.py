"""The host: kernel, processors, shared memory, limits, and the run directory."""

from __future__ import annotations

import os
import platform
import resource
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvxferd.control.fd_budget import fds_needed
from kvxferd.doctor.network import rdma_cards
from kvxferd.doctor.report import CheckContext, Finding, fail, ok, warn
from kvxferd.errors import KvxferdError
from kvxferd.memory import SealedMemory, check_memfd, map_memfd
from kvxferd.telemetry.late_timers import REMEDY, Cause, ClockReading, Lateness, lateness_of, read_clocks
from kvxferd.telemetry.units import format_size

_MEMFD_BYTES = 1 << 16

# Forty wake-ups: a node that starves its daemons does so for seconds at a time.
MEASURE_S = 2.0
SLEEP_S = 0.05

SHM_DIR = "/dev/shm"
SHM_BYTES_PER_MOVER = 4 << 20  # UCX makes one file for each connected mover


def kernel(node: CheckContext) -> Iterator[Finding]:
    """Use the system calls of a registration: pidfds, and sealed memory that another process maps."""
    release = platform.release()
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        yield fail(
            "kernel",
            f"{release}: pidfd_open fails: {error.strerror}",
            "run a kernel of 5.3 or newer, without a seccomp filter that forbids pidfd_open",
            essential=True,
        )
    else:
        yield ok("kernel", f"{platform.system()} {release}, {platform.machine()}", release=release)
    try:
        found = "" if _is_shared() else "what is written to one mapping of a memfd is not seen in the other"
    except (OSError, KvxferdError) as error:
        found = str(error)
    if found:
        todo = "let the sandbox or seccomp filter pass memfd_create and fcntl's seals: no cache can register"
        yield fail("sealed memory", found, todo, essential=True)
    else:
        yield ok("sealed memory", "a sealed memfd is shared as it must be")


def _is_shared() -> bool:
    """Whether two mappings of a sealed memfd show the same bytes. Raises where there can be none."""
    with SealedMemory.create(_MEMFD_BYTES, "kvxferd-doctor") as memory:
        check_memfd(memory.fd, _MEMFD_BYTES)
        mapping = map_memfd(memory.fd, _MEMFD_BYTES)
        mapping.view()[:5] = b"there"
        is_shared = memory.buffer[:5] == b"there"
        mapping.unmap()
    return is_shared


class WakeUps(NamedTuple):
    """How late a process woke up from short sleeps."""

    num_sleeps: int
    latest_s: float
    late: Lateness | None  # the latest that was too late


def processors(node: CheckContext) -> Iterator[Finding]:
    """Sleep for short times, and measure how late this process wakes up."""
    yield judge_wake_ups(measure_wake_ups(read_clocks, time.sleep), len(os.sched_getaffinity(0)))


def measure_wake_ups(read: Callable[[], ClockReading], sleep: Callable[[float], None]) -> WakeUps:
    """Sleep for `SLEEP_S` again and again, for `MEASURE_S` in all."""
    num_sleeps, latest_s = 0, 0.0
    late: Lateness | None = None
    before = read()
    end = before.now + MEASURE_S
    while before.now < end:
        sleep(SLEEP_S)
        after = read()
        num_sleeps += 1
        latest_s = max(latest_s, after.now - before.now - SLEEP_S)
        found = lateness_of(before, after, SLEEP_S)
        if found is not None and (late is None or found.late_s > late.late_s):
            late = found
        before = after
    return WakeUps(num_sleeps, latest_s, late)


def judge_wake_ups(measured: WakeUps, num_processors: int) -> Finding:
    """Return the row: a wake-up later than half a second is a warning."""
    facts = {
        "processors": num_processors,
        "sleeps": measured.num_sleeps,
        "latest_s": round(measured.latest_s, 6),
        "cause": measured.late.cause.value if measured.late else "",
    }
    to_run_on = "one processor" if num_processors == 1 else f"{num_processors} processors"
    of = f"of {measured.num_sleeps} wake-ups, with {to_run_on} to run on,"
    if measured.late is None:
        return ok("processors", f"the latest {of} was {1000 * measured.latest_s:.1f} ms late", **facts)
    found = f"the latest {of} was {measured.late.late_s:.1f} s late"
    if measured.late.cause is Cause.STARVED:
        return warn("processors", f"{found}: no processor was free", REMEDY, **facts)
    todo = "run this check again; if it repeats, look at the machine: a paused virtual machine, a slow disk"
    return warn("processors", f"{found}, and not for lack of a processor", todo, **facts)


def shared_memory(node: CheckContext) -> Iterator[Finding]:
    """Check size, free space and access of /dev/shm, which holds UCX's queues between processes."""
    place = node.environment.get("UCX_POSIX_DIR", SHM_DIR)
    max_ranks = node.config.limits.max_ranks
    needed = max_ranks * SHM_BYTES_PER_MOVER
    todo = f"mount a tmpfs of {format_size(needed)} or more there (in a pod: an emptyDir of medium Memory)"
    try:
        status = os.statvfs(place)
    except OSError as error:
        yield warn("shared_memory", f"{place}: {error.strerror}", todo)
        return
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    found = f"{place}: {format_size(size)}, {format_size(free)} free"
    if not os.access(place, os.W_OK | os.X_OK):
        yield warn("shared_memory", f"{place} cannot be written by uid {os.geteuid()}", todo)
    elif free < needed:
        found += f"; {max_ranks} ranks (limits.max_ranks) may need {format_size(needed)}"
        yield warn("shared_memory", found, todo, size=size, free=free)
    else:
        yield ok("shared_memory", found, size=size, free=free)


def memlock(node: CheckContext) -> Iterator[Finding]:
    """Check RLIMIT_MEMLOCK, which movers inherit: a network card locks all of the memory that it reads.

    It does not apply to root with CAP_IPC_LOCK.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield ok("memlock", "unlimited", limit=-1)
    elif _may_lock():
        yield ok("memlock", f"limit {format_size(soft)}, and CAP_IPC_LOCK passes it", limit=soft)
    else:
        matters = "" if rdma_cards() else "; it matters once there is an RDMA card"
        yield warn(
            "memlock",
            f"limit {format_size(soft)}: an RDMA card cannot register a cache larger than that{matters}",
            "raise it: LimitMEMLOCK=infinity in the unit, ulimit -l unlimited, or give CAP_IPC_LOCK",
            limit=soft,
        )


def _may_lock() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> 14 & 1)  # CAP_IPC_LOCK
    return False


def descriptors(node: CheckContext) -> Iterator[Finding]:
    """Check RLIMIT_NOFILE's hard limit, to which the daemon raises its soft limit.

    A GPU rank sends a descriptor for each physical allocation.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = fds_needed(node.config.limits)
    if hard != resource.RLIM_INFINITY and hard < needed:
        yield warn(
            "descriptors",
            f"at most {hard}; a full node of these limits has {needed} open, and GPU ranks bring more",
            f"raise the hard limit: LimitNOFILE={max(65536, needed)} in the unit",
            soft=soft,
            hard=hard,
        )
    else:
        yield ok("descriptors", f"at most {hard} (now {soft}; the daemon raises it)", soft=soft, hard=hard)


def run_directory(node: CheckContext) -> Iterator[Finding]:
    """Check whether this user can run a daemon there, and who may use the sockets."""
    path = Path(node.config.node.run_dir)
    if not _exists(path):
        yield _absent_run_directory(path)
        return
    if not os.access(path, os.W_OK | os.X_OK):
        yield warn(
            "run_directory",
            f"{path} cannot be written by uid {os.geteuid()}",
            "run the daemon as the directory's owner, or set node.run_dir to one of this user's",
        )
    else:
        yield ok("run_directory", f"{path}, {_owner(path)}")
    for name, socket in (("worker", node.config.worker.socket), ("control", node.config.control.socket)):
        if _exists(Path(socket)):
            yield ok(f"{name} socket", f"{socket}, {_owner(Path(socket))}")


def _absent_run_directory(path: Path) -> Finding:
    parent = next((p for p in path.parents if _exists(p)), Path("/"))
    if os.access(parent, os.W_OK | os.X_OK):
        return ok("run_directory", f"{path} is not there; a daemon of this user makes it")
    return fail(
        "run_directory",
        f"{path} is not there, and uid {os.geteuid()} cannot make it in {parent}",
        "make it, owned by the daemon's user (RuntimeDirectory= in the unit), or set node.run_dir",
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:
        return False


def _owner(path: Path) -> str:
    status = path.stat()
    return f"{stat.filemode(status.st_mode)} of uid {status.st_uid}, gid {status.st_gid}"
