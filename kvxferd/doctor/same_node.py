"""How processes of this node read from one another: by a copy in the kernel (CMA), or over TCP."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from kvxferd.doctor.finding import CheckContext, Finding, fail, ok, warn
from kvxferd.doctor.nixl_read_test import ReadResult, read_between
from kvxferd.mover.backends import UCX
from kvxferd.tooling.process_vm import read_process_memory

_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_CHECK = "same node"
SLOW = "reads within this node then go over TCP"


def check(node: CheckContext) -> Iterator[Finding]:
    """Read between two processes of this user, and compare every byte."""
    reading = read_between(node)
    facts = {
        "ptrace_scope": _ptrace_scope(),
        "pid_namespace": os.readlink("/proc/self/ns/pid"),
        "uid": os.geteuid(),
        "lanes": reading.node_transports,
        "lanes_to_itself": reading.loopback_transports,
        **reading.value,
    }
    if not reading.value:
        yield fail(_CHECK, reading.failure, "mend what `nixl` names first", essential=True, **facts)
    elif not reading.value["intact"]:
        todo = "do not use this node before UCX and NIXL are others, and tell their maintainers"
        yield fail(_CHECK, "a read brought other bytes than were there", todo, essential=True, **facts)
    elif reading.value["over_tcp"]:
        yield warn(_CHECK, f"{_speed(reading)} over TCP", _advice(node, reading), **facts)
    else:
        who = f"between processes of uid {os.geteuid()} in {facts['pid_namespace']}"
        yield ok(_CHECK, f"{_speed(reading)} over {reading.node_transports or 'no TCP'}, {who}", **facts)


def _speed(reading: ReadResult) -> str:
    return f"{reading.value['gigabytes_per_s']:.3g} GB/s"


def _advice(node: CheckContext, reading: ReadResult) -> str:
    if node.config.mover.backend != UCX:
        return f"{node.config.mover.backend} chose it; where UCX reads faster, set mover.backend to UCX"
    if transports := node.environment.get("UCX_TLS"):
        return f"UCX_TLS={transports} is set: unset it, or add cma to it"
    scope = _ptrace_scope()
    if scope >= 2:
        return (
            f"/proc/sys/kernel/yama/ptrace_scope is {scope}: set it to 0 or 1"
            + (", or give the daemon CAP_SYS_PTRACE" if scope == 2 else "")
            + f"; {SLOW}"
        )
    if (failed := _process_vm_errno()) != 0:
        return (
            f"process_vm_readv fails ({errno.errorcode.get(failed, failed)}): let the container's seccomp "
            f"profile pass process_vm_readv and process_vm_writev; {SLOW}"
        )
    if "cma" in reading.loopback_transports:
        return f"UCX copies within a process and not between two: see the facts under --json; {SLOW}"
    return f"this build of UCX has no CMA: use NIXL's own wheel; {SLOW}"


def _ptrace_scope() -> int:
    try:
        return int(_SCOPE.read_text())
    except (OSError, ValueError):  # the kernel has no Yama
        return 0


def _process_vm_errno() -> int:
    """Copy a byte within this process as CMA does; return 0 or the errno."""
    source = ctypes.create_string_buffer(b"x")
    return read_process_memory(os.getpid(), ctypes.addressof(source), 1)
