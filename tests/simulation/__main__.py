"""`make simulate FAULTS=N SEED=S`: ends with one line of JSON; exits 1 where a promise was broken.

--episode SEED runs one, and tells of it what concerns the broken promise; --shrink leaves out of it what it
does not take to fail, and writes what is left to a file, which --plan FILE runs.
--coverage shows which states and branches of the product were met; with --record they are compared with the
record (`met.tsv`), with --write-record they become it.
--times shows how long what is promised in time takes after a fault, in virtual time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from tests.simulation import rare_states

PLANS = Path(__file__).parents[2] / "build"


def main() -> int:
    """Run what is asked for."""
    arguments = argparse.ArgumentParser(prog="simulation", description=__doc__)
    arguments.add_argument("--faults", type=int, default=1000)
    arguments.add_argument("--seed", type=int, help="chosen and printed where none is given")
    arguments.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    arguments.add_argument("--max-failures", type=int, default=1, help="episodes that fail before it stops")
    arguments.add_argument(
        "--episode", type=int, help="run the episode of this seed alone, and tell its story"
    )
    arguments.add_argument(
        "--shrink", action="store_true", help="of a failing --episode: what it takes to fail"
    )
    arguments.add_argument("--plan", type=Path, help="run the episode of a file that --shrink has written")
    arguments.add_argument("--lines", type=int, default=60, help="of the story")
    arguments.add_argument("--story", action="store_true", help="all of it, whomever it concerns")
    arguments.add_argument("--nodes", type=int, help="by default episodes of two sizes take turns")
    arguments.add_argument("--engines", type=int)
    arguments.add_argument("--episode-faults", type=int, help="of one episode")
    arguments.add_argument("--times", action="store_true")
    arguments.add_argument("--coverage", action="store_true")
    arguments.add_argument("--record", action="store_true")
    arguments.add_argument("--write-record", action="store_true")
    given = arguments.parse_args()
    has_coverage = given.coverage or given.record or given.write_record
    if has_coverage:
        rare_states.start()  # before anything of the package is imported
    import msgspec

    from tests.simulation import runs, shrink, story
    from tests.simulation.episode import Plan, Result, Size

    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(1 << 32)
    signals: list[int] = []  # after the first the line of JSON comes all the same
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: signals.append(received))

    def show(result: Result) -> None:
        if result.check:
            print(f"episode {result.seed}: {result.check}: {result.problem}", file=sys.stderr, flush=True)

    asked = {"nodes": given.nodes, "engines": given.engines, "faults": given.episode_faults}
    asked = {name: number for name, number in asked.items() if number is not None}
    size = Size(**asked) if asked else None
    began = time.monotonic()
    if given.episode is not None or given.plan is not None:
        tally = runs.Tally(seed)
        if given.plan is not None:
            plan = msgspec.json.decode(given.plan.read_bytes(), type=Plan)
        else:
            plan = Plan.draw(given.episode, size or runs.size_of(given.episode))
        if given.shrink:
            plan, result = shrink.shrink(plan, sys.stderr)
            PLANS.mkdir(exist_ok=True)
            path = PLANS / f"episode-{plan.seed}.json"
            path.write_bytes(msgspec.json.encode(plan))
            print(f"--plan {path} runs it", file=sys.stderr)
        else:
            result = runs.run(plan, keeps_story=True)
        told = result.story
        if result.check and not given.story:
            told = story.tell(result.story, result.check, result.problem, given.lines)
        print("\n".join(told if given.story else told[-given.lines :]), file=sys.stderr)
        show(result)
        tally.add(result)
    else:
        print(f"seed {seed}", file=sys.stderr, flush=True)
        tally = runs.run_many(
            seed,
            given.faults,
            size=size,
            measures=given.times,
            jobs=given.jobs,
            max_failures=given.max_failures,
            on_result=show,
            is_over=lambda: bool(signals),
        )
        if given.times:
            print("\n".join(tally.times()), file=sys.stderr)
    lost: list[str] = []
    if has_coverage:
        places = rare_states.places()
        print(rare_states.summary(tally.met, places), file=sys.stderr)
        if given.record:
            lost = rare_states.compare(rare_states.read(), tally.met, places)
            print("\n".join(lost), file=sys.stderr)
        if given.write_record:
            rare_states.write(tally.met)
    line = tally.fields(time.monotonic() - began)
    print(json.dumps(line | ({"places_met": len(tally.met), "lost": len(lost)} if has_coverage else {})))
    return 1 if tally.failed or lost else 0


if __name__ == "__main__":
    sys.exit(main())
