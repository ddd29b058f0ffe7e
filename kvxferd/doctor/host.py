"""The host: kernel, shared memory, the limit on locked memory, and the run directory."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path

from kvxferd.doctor.network import rdma_cards
from kvxferd.doctor.report import CheckContext, Finding, fail, ok, warn
from kvxferd.errors import KvxferdError
from kvxferd.memory import SealedMemory, check_memfd, map_memfd
from kvxferd.telemetry.units import format_size

_MEMFD_BYTES = 1 << 16

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


def run_directory(node: CheckContext) -> Iterator[Finding]:
    """Check whether this user can run a daemon there."""
    path = Path(node.config.node.run_dir)
    there = next(place for place in (path, *path.parents) if os.path.exists(place))
    if os.access(there, os.W_OK | os.X_OK):
        yield ok("run_directory", f"{path}" + ("" if there == path else ": a daemon of this user makes it"))
    else:
        yield fail(
            "run_directory",
            f"uid {os.geteuid()} cannot {'write to' if there == path else 'make'} {path}",
            "have it owned by the daemon's user (RuntimeDirectory= in the unit), or set node.run_dir",
        )
