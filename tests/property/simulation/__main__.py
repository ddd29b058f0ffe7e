"""`make simulate FAULTS=N SEED=S`: ends with one line of JSON; exits 1 where a promise was broken.

`make proofs ONLY=liveness` measures how long things take after a fault, and prints a table before that line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.property.simulation.episode import Episode, Result, Size
from tests.property.simulation.liveness import Distributions, LivenessEpisode
from tests.property.simulation.shrink import shrink_and_print

BROKEN = ("wrong_bytes", "violations", "hung", "leaked")


class Tally:
    """What all episodes came to."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.faults: Counter[str] = Counter()
        self.broken: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()
        self.virtual_s = 0.0
        self.failed_seeds: list[int] = []
        self._digest = hashlib.sha256()

    def add(self, result: Result) -> None:
        """Count an episode."""
        self.faults += result.faults
        self.totals.update(
            episodes=1,
            steps=result.steps,
            transfers=result.transfers,
            delivered=result.delivered,
            in_flight=result.in_flight,
        )
        self.virtual_s += result.virtual_s
        self._digest.update(result.digest.encode())
        if result.kind:
            self.broken[result.kind] += result.num_wrong or 1
            self.failed_seeds.append(result.seed)

    def line(self, elapsed_s: float, **more: Any) -> str:
        """Return the line of JSON."""
        num_faults = self.faults.total()
        totals = {name: self.totals[name] for name in ("episodes", "steps", "transfers", "delivered")}
        return json.dumps(
            {
                "seed": self.seed,
                "faults": num_faults,
                "faults_by_kind": dict(sorted(self.faults.items())),
                **totals,
                "virtual_s": round(self.virtual_s, 1),
                "failed": self.totals["transfers"] - self.totals["delivered"],
                **{kind: self.broken[kind] for kind in BROKEN},
                "in_flight": self.totals["in_flight"],
                "faults_per_s": round(num_faults / elapsed_s, 1) if elapsed_s else 0.0,
                "trace_sha256": self._digest.hexdigest(),
                "failed_episodes": self.failed_seeds[:100],
            }
            | more
        )


def simulate(
    seed: int,
    num_faults: int,
    size: Size,
    max_failures: int = 1,
    verbose: bool = False,
    make: Callable[[int, Size], Episode] = Episode,
    is_over: Callable[[], bool] = lambda: False,
) -> Tally:
    """Run episodes until so many faults have struck, so many episodes have failed, or `is_over`."""
    seeds = random.Random(seed)
    tally = Tally(seed)
    reported = 0
    while tally.faults.total() < num_faults and len(tally.failed_seeds) < max_failures and not is_over():
        result = make(seeds.getrandbits(48), size).run()
        tally.add(result)
        if result.kind and verbose:
            print(f"episode {result.seed}: {result.kind}: {result.problem}", file=sys.stderr, flush=True)
        if verbose and tally.faults.total() >= reported + 10_000:
            reported = tally.faults.total()
            print(f"{reported} faults, {tally.totals['delivered']} delivered", file=sys.stderr, flush=True)
    return tally


def main() -> int:
    logging.disable(logging.CRITICAL)
    signals: list[int] = []  # after the first the episode ends, and the line of JSON comes all the same
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: signals.append(received))
    arguments = argparse.ArgumentParser(prog="simulation", description=__doc__)
    arguments.add_argument("--faults", type=int, default=1000)
    arguments.add_argument("--seed", type=int, default=None, help="chosen and printed where none is given")
    arguments.add_argument("--nodes", type=int, default=Size.nodes)
    arguments.add_argument("--engines", type=int, default=Size.engines)
    arguments.add_argument("--episode-faults", type=int, default=Size.faults, help="of one episode")
    arguments.add_argument("--max-failures", type=int, default=1, help="episodes that fail before it stops")
    arguments.add_argument("--episode", type=int, default=None, help="run the episode of this seed alone")
    arguments.add_argument(
        "--shrink", action="store_true", help="of a failing --episode: what it takes to fail, with its trace"
    )
    arguments.add_argument("--trace", action="store_true", help="print what the episode's actors do")
    arguments.add_argument(
        "--liveness", action="store_true", help="measure recovery, release and quarantine in virtual time"
    )
    given = arguments.parse_args()
    found = Distributions()
    size = Size(given.nodes, given.engines, given.episode_faults)
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(1 << 32)
    began = time.process_time()
    if given.episode is not None:
        tally = Tally(seed)
        if given.shrink:
            result = shrink_and_print(given.episode, size)
        else:
            kind = partial(LivenessEpisode, found) if given.liveness else Episode
            result = kind(given.episode, size, keeps_trace=given.trace).run()
            print("\n".join([*result.trace, f"{result.kind}: {result.problem}"]), file=sys.stderr)
        tally.add(result)
    else:
        print(f"seed {seed}", file=sys.stderr, flush=True)
        make = partial(LivenessEpisode, found) if given.liveness else Episode
        tally = simulate(
            seed,
            given.faults,
            size,
            given.max_failures,
            verbose=True,
            make=make,
            is_over=lambda: bool(signals),
        )
    more = {}
    if given.liveness:
        print(found.table())
        more["liveness"] = found.rows()
    print(tally.line(time.process_time() - began, **more))
    return 1 if tally.failed_seeds else 0


if __name__ == "__main__":
    sys.exit(main())
