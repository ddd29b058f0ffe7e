"""What the kernel says of processes: children, life, descriptors, and who maps a memfd."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def children(pid: int) -> list[int]:
    with suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return []


def descendants(pid: int) -> list[int]:
    return [p for child in children(pid) for p in (child, *descendants(child))]


def state_of(pid: int) -> str:
    """The letter that ps shows; "" where there is no such process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return ""


def lives(pid: int) -> bool:
    return state_of(pid) not in ("", "Z", "X")


def num_fds(pid: int) -> int:
    with suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def rss_kib(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
    return 0


def maps(pid: int, inode: int) -> bool:
    """Whether the process maps that memfd."""
    with suppress(OSError):
        return f" {inode} " in Path(f"/proc/{pid}/maps").read_text()
    return False


def mappers_of(inode: int) -> list[int]:
    """Every process on this machine that maps that memfd."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and maps(int(name), inode)]
