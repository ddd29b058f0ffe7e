"""``python -m tests.proofs.chaos.soak --minutes M``: engines come and go, nothing breaks, nothing may grow.

The requests are those of `chaos`; each engine has a new name every time it starts. Samples are taken while
that goes on, the last line is JSON. Exits 1 where a transfer was wrong, where something is left at the end,
or where memory or descriptors grew.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.proofs.chaos.epoch import SHAPES, Epoch
from tests.proofs.chaos.node import Node
from tests.proofs.chaos.tally import Tally
from tests.support.nodes.processes import descendants, num_fds, rss_kib

LIVES_S = 10.0, 45.0  # of a prefill and of a decode engine
SAMPLE_EVERY_S = 30.0
# Ended transfers are remembered for 600 s: growth until then is no leak, and nothing is judged by it.
SETTLED_S = 630.0
GROWTH = {"rss_kib": 6 << 10, "parent_rss_kib": 6 << 10, "fds": 6}  # what a node may grow by


def sample_of(node: Node) -> dict[str, int]:
    parent = node.parent()
    return {
        "rss_kib": rss_kib(node.pid),
        "parent_rss_kib": rss_kib(parent) if parent else 0,
        "fds": num_fds(node.pid),
        "processes": len(descendants(node.pid)),
    }


def soak(epoch: Epoch, tally: Tally, seconds: float) -> list[dict[str, Any]]:
    """Return the samples of that time."""
    began = time.monotonic()
    replaced_at, samples = [began, began], list[dict[str, Any]]()
    while (now := time.monotonic()) < began + seconds:
        epoch.requests(0.01)
        for index, lives_s in enumerate(LIVES_S):
            if now > replaced_at[index] + lives_s:
                epoch.replace(index, f"{('prefill', 'decode')[index]}-{round(now - began)}")
                replaced_at[index] = now
        if now > began + SAMPLE_EVERY_S * len(samples):
            nodes = {node.name: sample_of(node) for node in epoch.cluster.nodes}
            samples.append({"at_s": round(now - began), "delivered": tally.delivered} | nodes)
            print(json.dumps(samples[-1]), file=sys.stderr, flush=True)
    return samples


def check_growth(samples: list[dict[str, Any]], tally: Tally) -> None:
    """Compare the first samples since when nothing may grow with the last ones."""
    settled = [sample for sample in samples if sample["at_s"] >= SETTLED_S]
    for node in ("p", "d") if len(settled) >= 4 else ():
        for what, slack in GROWTH.items():
            first = min(sample[node][what] for sample in settled[:2])
            last = min(sample[node][what] for sample in settled[-2:])
            if last > first + slack:
                tally.problem("leaked", f"{what} of {node} grew from {first} to {last}")


def main() -> int:
    arguments = argparse.ArgumentParser(prog="chaos.soak", description=__doc__)
    arguments.add_argument("--minutes", type=float, default=30.0)
    arguments.add_argument("--seed", type=int, default=1)
    given = arguments.parse_args()
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="kvxferd-soak-") as directory:
        epoch = Epoch(Path(directory), random.Random(given.seed), tally, SHAPES[-1], "default", "auto")
        try:
            samples = soak(epoch, tally, given.minutes * 60)
            epoch.run(0)  # the audit
        finally:
            epoch.close()
    check_growth(samples, tally)
    print(tally.line(given.seed, minutes=given.minutes, first=samples[0], last=samples[-1]))
    return 0 if tally.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
