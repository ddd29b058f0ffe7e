"""How processes read from one another: within this node by CMA or TCP, to others by the network cards."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from kvxferd.doctor.nixl_read import ReadResult, read_between
from kvxferd.doctor.report import CheckContext, Finding, fail, ok, warn
from kvxferd.mover.backends import UCX
from kvxferd.tooling.process_vm import read_process_memory

_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_SLOW = "reads within this node then go over TCP"

_CARDS = Path("/sys/class/infiniband")
_VERBS = Path("/dev/infiniband")


def same_node(node: CheckContext) -> Iterator[Finding]:
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
        todo = "mend what `software: nixl` names first"
        yield fail("same_node", reading.failure, todo, essential=True, **facts)
    elif not reading.value["intact"]:
        todo = "do not use this node before UCX and NIXL are others, and tell their maintainers"
        yield fail("same_node", "a read brought other bytes than were there", todo, essential=True, **facts)
    elif reading.value["over_tcp"]:
        yield warn("same_node", f"{reading.speed} over TCP", _advice(node, reading), **facts)
    else:
        who = f"between processes of uid {os.geteuid()} in {facts['pid_namespace']}"
        found = f"{reading.speed} over {reading.node_transports or 'no TCP'}, {who}"
        yield ok("same_node", found, **facts)


def _advice(node: CheckContext, reading: ReadResult) -> str:
    if node.config.mover.backend != UCX:
        return f"{node.config.mover.backend} chose it; where UCX reads faster, set mover.backend to UCX"
    if transports := node.environment.get("UCX_TLS"):
        return f"UCX_TLS={transports} is set: unset it, or add cma to it"
    scope = _ptrace_scope()
    if scope >= 2:
        or_capability = ", or give the daemon CAP_SYS_PTRACE" if scope == 2 else ""
        return f"{_PTRACE_SCOPE} is {scope}: set it to 0 or 1{or_capability}; {_SLOW}"
    if (failed := _process_vm_errno()) != 0:
        return (
            f"process_vm_readv fails ({errno.errorcode.get(failed, failed)}): let the container's seccomp "
            f"profile pass process_vm_readv and process_vm_writev; {_SLOW}"
        )
    if "cma" in reading.loopback_transports:
        return f"UCX copies within a process and not between two: see the facts under --json; {_SLOW}"
    return f"this build of UCX has no CMA: use NIXL's own wheel; {_SLOW}"


def _ptrace_scope() -> int:
    try:
        return int(_PTRACE_SCOPE.read_text())
    except (OSError, ValueError):  # the kernel has no Yama
        return 0


def _process_vm_errno() -> int:
    """Copy a byte within this process as CMA does; return 0 or the errno."""
    source = ctypes.create_string_buffer(b"x")
    return read_process_memory(os.getpid(), ctypes.addressof(source), 1)


def tcp(node: CheckContext) -> Iterator[Finding]:
    """Read between two processes that may use TCP only, which is a setting of UCX.

    Nodes without an RDMA card read so, and users and PID namespaces of one node.
    """
    if node.config.mover.backend != UCX:
        return
    reading = read_between(node, "tcp")
    if reading.value and reading.value["intact"] and reading.value["over_tcp"]:
        yield ok("tcp", f"{reading.speed} through loopback", **reading.value)
        return
    found = reading.failure or "a read that should go over TCP did not, or brought other bytes"
    todo = (
        "bring up a network interface, and the loopback, and see that UCX_NET_DEVICES names one of them; "
        "without TCP NIXL makes no connection"
    )
    yield fail("tcp", found, todo, essential=True)


def cards(node: CheckContext) -> Iterator[Finding]:
    """Yield each RDMA card with whether this user may open it."""
    if not (found := rdma_cards()):
        yield fail("rdma", "there is no RDMA card", "without one, other nodes are read over TCP")
    yield from map(_card, found)


def rdma_cards() -> list[Path]:
    """Return the RDMA devices of this node."""
    return sorted(_CARDS.iterdir()) if _CARDS.is_dir() else []


def _card(card: Path) -> Finding:
    ports = [
        f"port {p.name} {_read_text(p / 'state')}, {_read_text(p / 'rate')}"
        for p in sorted((card / "ports").iterdir())
    ]
    found = f"{card.name}: {'; '.join(ports)}"
    if not any("ACTIVE" in port for port in ports):
        return warn("rdma", found, "no port is active: see its cable and its switch")
    if not any(os.access(device, os.R_OK | os.W_OK) for device in _VERBS.glob("uverbs*")):
        todo = "give this user (or the container) /dev/infiniband/uverbs* with read and write"
        return fail("rdma", f"{found}; no device file can be opened", todo)
    return ok("rdma", found)


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"
