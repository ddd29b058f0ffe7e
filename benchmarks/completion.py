"""How long a shell waits for a completion, beside an interpreter that does nothing.

    python benchmarks/completion.py [--rounds 20]

Each round runs all lines in turn, as bash does, and `python -c pass` between them. Medians; the ratio is that
of a line's median to the interpreter's. The aim is under 150 ms for each line.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time

LINES = ("kvxferd st", "kvxferd status --", "kvxferd cancel --", "kvxferd doctor --", "kvxferd serve --")
NOTHING = "python -c pass"


def main() -> None:
    """Measure and print a line for each completion."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    taken: dict[str, list[tuple[float, float]]] = {line: [] for line in (NOTHING, *LINES)}
    for _ in range(rounds):
        for line, times in taken.items():
            times.append(_run(line))
    print(f"{rounds} rounds; wall and processor time, medians")
    base_wall, base_cpu = (statistics.median(one) for one in zip(*taken[NOTHING], strict=True))
    for line, times in taken.items():
        wall, cpu = (statistics.median(one) for one in zip(*times, strict=True))
        ratios = f"{wall / base_wall:4.1f} and {cpu / base_cpu:4.1f} times {NOTHING}"
        print(f"{line:22} {wall * 1e3:6.1f} ms {cpu * 1e3:6.1f} ms   {ratios}")


def _run(line: str) -> tuple[float, float]:
    """Return the wall and the processor time of one completion, in seconds."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = ["-c", "pass"] if line == NOTHING else ["-m", "kvxferd.cli"]
    completed = {
        "_KVXFERD_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
    }
    subprocess.run(
        [sys.executable, *command], env=os.environ | completed, stdout=subprocess.DEVNULL, check=True
    )
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
