"""`make hostile`: ends with one line of JSON; exits 1 where an attack was not survived."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from tests.proofs.hostile.attack import OUTSIDERS, attacks
from tests.proofs.hostile.runner import Outcome, Runner


def summary(outcomes: list[Outcome], seed: int, elapsed_s: float) -> dict[str, object]:
    """What is printed last."""
    outside = [o.extra_mb for o in outcomes if o.attack.who in OUTSIDERS]
    others = [o.extra_mb for o in outcomes if o.attack.who not in OUTSIDERS]
    return {
        "attacks": len(outcomes),
        "survived": sum(o.survived for o in outcomes),
        "wrong_items": sum(o.traffic.wrong for o in outcomes),
        "worst_turn_ms": round(max((o.turn_ms for o in outcomes), default=0.0), 1),
        "peak_extra_rss_mb": round(max(outside, default=0.0), 1),
        "peak_extra_rss_mb_of_ranks_and_peers": round(max(others, default=0.0), 1),
        "honest_pulls": sum(o.traffic.done for o in outcomes),
        "honest_pulls_failed": sum(len(o.traffic.failures) for o in outcomes),
        "not_survived": [o.attack.name for o in outcomes if not o.survived],
        "seed": seed,
        "elapsed_s": round(elapsed_s, 1),
    }


def main() -> int:
    arguments = argparse.ArgumentParser(prog="hostile", description=__doc__)
    arguments.add_argument("--only", default="", help="attacks whose names contain one of these, by commas")
    arguments.add_argument("--list", action="store_true", help="name them, and what they are about")
    arguments.add_argument("--seed", type=int, default=None, help="chosen and printed where none is given")
    arguments.add_argument("--keep", type=Path, help="where logs are kept; else they are removed")
    given = arguments.parse_args()
    words = given.only.split(",")
    chosen = [a for a in attacks().values() if any(w in a.name for w in words)]
    if given.list:
        for each in chosen:
            print(f"{each.name:34} {each.who:9} {each.about}")
        return 0
    if os.geteuid() != 0:
        print("hostile: cannot play other users: it needs root", file=sys.stderr)
        return 2
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}", file=sys.stderr, flush=True)
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    runner = Runner(seed, given.keep)
    try:
        outcomes = runner.run(chosen)
    finally:
        runner.close()
    for what in runner.left_behind:
        print(f"left behind: {what}", file=sys.stderr)
    print(json.dumps(summary(outcomes, seed, time.monotonic() - began)))
    return 0 if all(o.survived for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
