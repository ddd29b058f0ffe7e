"""Network cards: RDMA devices and whether this user may open them, else plain interfaces."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from kvxferd.doctor.finding import CheckContext, Finding, fail, ok, warn

_CARDS = Path("/sys/class/infiniband")
_VERBS = Path("/dev/infiniband")
_SIOCGIFFLAGS = 0x8913
_UP_AND_RUNNING = 0x1 | 0x40
_INTERFACES = Path("/sys/class/net")


def check(node: CheckContext) -> Iterator[Finding]:
    """Yield a finding for each card."""
    interfaces = [_interface(name) for _, name in socket.if_nameindex() if name != "lo"]
    up = [text for is_up, text in interfaces if is_up]
    if up:
        yield ok("interfaces", ", ".join(up))
    else:
        found = ", ".join(text for _, text in interfaces) or "none but loopback"
        yield warn("interfaces", found, "bring one up: no other node can be read")
    cards = rdma_cards()
    if not cards:
        yield fail("rdma", "there is no RDMA card", "without one, other nodes are read over TCP")
    for card in cards:
        yield _card(card)


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
    openable = (
        [p for p in _VERBS.glob("uverbs*") if os.access(p, os.R_OK | os.W_OK)] if _VERBS.is_dir() else []
    )
    if not openable:
        todo = "give this user (or the container) /dev/infiniband/uverbs* with read and write"
        return fail("rdma", f"{found}; no device file can be opened", todo)
    return ok("rdma", found)


def _interface(name: str) -> tuple[bool, str]:
    is_up, speed = _is_up(name), _read_text(_INTERFACES / name / "speed")
    known = speed.isdigit()  # a virtual interface has -1 or an error
    return is_up, f"{name} {'up' if is_up else 'down'}" + (f" {int(speed) / 1000:g} Gb/s" if known else "")


def _is_up(name: str) -> bool:
    # /sys is not used: it may show another network namespace than that of this process.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("16sH14x", name.encode(), 0)
        (flags,) = struct.unpack_from("16xH", fcntl.ioctl(asking, _SIOCGIFFLAGS, request))
    return bool(flags & _UP_AND_RUNNING == _UP_AND_RUNNING)


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"
