"""Where the time of one pull goes: python benchmarks/timeline.py [--size 64K] [--pause-ms 5] [--pulls 200].

Two daemons and a rank of each; pulls that were prepared together, one after the other. It prints when each
step begins and ends, in microseconds from the engine's call of `pull`: medians over all pulls.
`timeline_hooks/sitecustomize.py` has the steps. Then the processor time of a pull in each process: without a
pause and with few cores these sums are what it waits for. And the floor: what a packet takes from one process
over two others and back, where none does anything else (engine, daemon, mover), and over one (engine, mover).
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack, suppress
from pathlib import Path

HOOKS = Path(__file__).parent / "timeline_hooks"
BLOCK_BYTES = 8192 * 2 * 2  # of two layers
BATCH, WARM_UP = 50, 5


def main() -> None:
    """Run pulls, and print their median."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--size", default="64K", help="of a pull: 64K, 4M, 64M")
    parser.add_argument("--pause-ms", type=float, default=0.0, help="between two pulls")
    parser.add_argument("--pulls", type=int, default=200, help="rounded up to batches of 45")
    given = parser.parse_args()
    units = {"K": 1 << 10, "M": 1 << 20}
    size = int(given.size[:-1]) * units[given.size[-1]]
    with tempfile.TemporaryDirectory() as directory:
        os.environ["TIMELINE_DIRECTORY"] = directory
        os.environ["PYTHONPATH"] = f"{HOOKS}:{os.environ.get('PYTHONPATH', '')}"
        sys.path.insert(0, str(HOOKS))
        import sitecustomize

        if not any(isinstance(finder, sitecustomize._Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, sitecustomize._Finder())
        spans = pull_all(size, given.pulls, given.pause_ms / 1e3)
        show(Path(directory), spans, sitecustomize)
        for num_others, whom in ((2, "engine, daemon, mover"), (1, "engine, mover")):
            times = pass_on_us(num_others, given.pulls, given.pause_ms / 1e3)
            print(f"a packet passed on by {whom}, and back: {statistics.median(times):.0f} us")


def pull_all(size: int, num_pulls: int, pause_s: float) -> list[tuple[int, int]]:
    """Return each pull's call and event, in nanoseconds."""
    import compare

    compare.NUM_BLOCKS = max(1, size // BLOCK_BYTES)
    with ExitStack() as stack:
        engines = compare.Engines(stack)
        spans: list[tuple[int, int]] = []
        spent: dict[str, float] = defaultdict(float)
        while len(spans) < num_pulls:
            refs = [engines.publish() for _ in range(BATCH)]
            for ref in refs:
                engines.ranks[compare.DECODE].rank.prepare(ref)
            time.sleep(0.4)  # no event reports that a prepare is done
            for number, ref in enumerate(refs):
                if number == WARM_UP:
                    before = processor_us()
                time.sleep(pause_s)
                began = time.monotonic_ns()
                engines.pull(ref)
                if number >= WARM_UP:
                    spans.append((began, time.monotonic_ns()))
            for name, us in processor_us().items():
                spent[name] += us - before[name]
        print("processor time of a pull, us, by process and its threads' names:")
        for name, us in sorted(spent.items(), key=lambda one: -one[1]):
            if us >= len(spans):
                print(f"{us / len(spans):8.0f}  {name}")
    return spans


def processor_us() -> dict[str, float]:
    """Return the processor time of this process and all below it, by process and its threads' name."""
    found: dict[str, float] = defaultdict(float)
    processes = [os.getpid()]
    for process in processes:  # which grows
        for task in Path(f"/proc/{process}/task").iterdir():
            with suppress(OSError):  # it has ended
                processes += map(int, (task / "children").read_text().split())
                name = f"{process} {(task / 'comm').read_text().strip()}"
                found[name] += int((task / "schedstat").read_text().split()[0]) / 1e3
    return found


def pass_on_us(num_others: int, num_packets: int, pause_s: float) -> list[float]:
    """Return what packets take from here over so many processes and back here."""
    pairs = [socket.socketpair() for _ in range(num_others + 1)]
    children = []
    for number in range(num_others):
        if not (pid := os.fork()):
            try:
                while packet := pairs[number][1].recv(4096):
                    pairs[number + 1][0].send(packet)
            finally:
                os._exit(0)
        children.append(pid)
    times = []
    for _ in range(num_packets):
        time.sleep(pause_s)
        began = time.monotonic_ns()
        pairs[0][0].send(b"x" * 200)
        pairs[-1][1].recv(4096)
        times.append((time.monotonic_ns() - began) / 1e3)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for pair in pairs:
        for end in pair:
            end.close()
    return times


def show(directory: Path, spans: list[tuple[int, int]], hooks: object) -> None:
    """Print the steps' medians."""
    record, steps = hooks.RECORD, hooks.STEPS  # type: ignore[attr-defined]
    marks = []
    for path in directory.iterdir():
        for step, is_end, pid, at in record.iter_unpack(path.read_bytes()):
            if at:
                marks.append((at, step, is_end, pid))
    marks.sort()
    seen: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    at = 0
    for (began, ended), (next_began, _) in zip(spans, [*spans[1:], spans[0]], strict=True):
        while at < len(marks) and marks[at][0] < began:
            at += 1
        times: dict[tuple[int, int], int] = defaultdict(int)
        until = ended + 3_000_000 if next_began < began else min(next_began, ended + 3_000_000)
        while at < len(marks) and marks[at][0] < until:
            when, step, is_end, _ = marks[at]
            times[step, is_end] += 1
            seen[step, times[step, is_end], is_end].append((when - began) / 1e3)
            at += 1
    print(f"{len(spans)} pulls: median {statistics.median(e - b for b, e in spans) / 1e3:.0f} us")
    rows = []
    for (step, nth, is_end), found in seen.items():
        if not is_end and len(found) * 2 > len(spans):
            ends = seen.get((step, nth, 1), [])
            rows.append((statistics.median(found), statistics.median(ends or [0]), step, nth))
    for from_us, to_us, step, nth in sorted(rows):
        print(f"{from_us:8.0f} {to_us:8.0f}  {steps[step][2]}" + (f" ({nth})" if nth > 1 else ""))


if __name__ == "__main__":
    main()
