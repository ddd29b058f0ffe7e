"""What the kernel says of processes: children, life, descriptors, and who maps a memfd."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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


def started_with(name: str, value: object) -> dict[int, str]:
    """The commands of the processes that were started with that variable, by pid; zombies have none."""
    found, variable = {}, f"{name}={value}".encode()
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):  # it is gone
            if variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                found[pid] = command.decode(errors="replace").strip()
    return found


def num_fds(pid: int) -> int:
    with suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def rss_kib(pid: int, field: str = "VmRSS") -> int:
    """Its memory; of another field of its status, "VmHWM" for the most that it had."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1])
    return 0


def maps(pid: int, inode: int) -> bool:
    """Whether the process maps that memfd."""
    with suppress(OSError):
        return f" {inode} " in Path(f"/proc/{pid}/maps").read_text()
    return False


def holds(pid: int, inode: int) -> bool:
    """Whether the process has a descriptor of that memfd."""
    with suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                if os.stat(fd).st_ino == inode and "memfd:" in os.readlink(fd):
                    return True
    return False


def mappers_of(inode: int, *, or_holders: bool = True) -> list[int]:
    """Every process of this machine that maps that memfd, or has a descriptor of it."""
    pids = map(int, filter(str.isdigit, os.listdir("/proc")))
    return [pid for pid in pids if maps(pid, inode) or (or_holders and holds(pid, inode))]


@contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """The processes do nothing inside the block; those that were killed in it stay dead."""
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
