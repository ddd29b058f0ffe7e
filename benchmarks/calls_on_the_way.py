"""How much Python is on a pull's way: python benchmarks/calls_on_the_way.py [--blocks 4] [--keep FOLDER].

Two daemons and a rank of each; prepared pulls, one after the other. It prints the Python calls and bytecodes
of each process from its first step to its last, the most frequent count of all pulls: other load on the
machine does not change them. FOLDER gets each process's calls, as `calls_hooks/sitecustomize.py` writes them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from pathlib import Path

NUM_PULLS = 60


def main() -> None:
    """Run pulls and print their counts."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--blocks", type=int, default=4, help="of a pull, 16 KiB each")
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    hooks = Path(__file__).parent / "calls_hooks"
    if "CALLS_DIRECTORY" not in os.environ:  # again, with the hooks from the start
        with tempfile.TemporaryDirectory() as directory:
            folder = options.keep or Path(directory)
            folder.mkdir(exist_ok=True)
            paths = f"{hooks}:{os.environ.get('PYTHONPATH', '')}"
            environment = {**os.environ, "CALLS_DIRECTORY": str(folder), "PYTHONPATH": paths}
            if not os.spawnve(os.P_WAIT, sys.executable, [sys.executable, *sys.argv], environment):
                show(folder)
        return
    import compare

    compare.NUM_BLOCKS = options.blocks
    with ExitStack() as stack:
        engines = compare.Engines(stack)
        for _ in range(NUM_PULLS):
            ref = engines.publish()
            engines.ranks[compare.DECODE].rank.prepare(ref)
            time.sleep(0.05)  # no event reports that a prepare is done
            engines.pull(ref)


def show(folder: Path) -> None:
    """Print the most frequent count of each span."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            if line.startswith("# "):
                what, _, count = line[2:].rpartition(": ")
                counts[what][count] += 1
    for what, found in sorted(counts.items()):
        count, times = found.most_common(1)[0]
        print(f"{what}: {count} ({times} of {found.total()})")


if __name__ == "__main__":
    main()
