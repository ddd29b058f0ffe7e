"""CPU time and memory of processes of this machine, as the kernel counts them."""

from __future__ import annotations

from pathlib import Path

# Names in maps of the memory that workers export, which counts as the worker's, not the mover's.
_EXPORTED = "/memfd:"


def process_tree(pid: int) -> list[int]:
    """Return a process and all its descendants, parents first."""
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return [pid, *(one for child in children for one in process_tree(child))]


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process, from a count in nanoseconds, not ticks."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, shared pages included."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(_kib(line) for line in lines if line.startswith("Rss:")) << 10


def private_bytes(pid: int) -> int:
    """Return the private memory of a process, without mappings of exported memory."""
    total = 0
    is_exported = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if "-" in name.split(" ")[0]:  # a mapping's first line: its addresses and what is mapped
            is_exported = _EXPORTED in line
        elif name in ("Private_Clean", "Private_Dirty") and not is_exported:
            total += int(rest.split()[0]) << 10
    return total


def available_bytes() -> int:
    """Return the memory that is available on this machine."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return sum(_kib(line) for line in lines if line.startswith("MemAvailable:")) << 10


def busy_cpu_seconds() -> float:
    """Return the time for which all CPUs of this machine have been busy since it started."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    idle_ticks = fields[3] + fields[4]
    return (sum(fields[:8]) - idle_ticks) / 100


def _kib(line: str) -> int:
    return int(line.split()[1])
