"""`make mutants`: run the simulation with each planted bug until it breaks a promise; the last line is JSON.

A mutant counts as caught where the episode that fails with it passes without it. One that needs a lying peer,
worker or mover is proved by its adversary test instead. Exits with 1 where fewer than 95 of 100 are caught,
and with --complete where a mutant is stale, or one that the simulation cannot notice has no test.

--generated N takes N mutants that are made from the source as it is. Of each that the simulation does not
notice it shows a diff, and what a test of its room says, or any unit test.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from tests.proofs.mutants.generate import diff_of, draw
from tests.proofs.mutants.mutant import PACKAGE, ROOT, Mutant, all_mutants, proofs, stale, unproved
from tests.proofs.mutants.simulate import Outcome, check_control, run_module, simulate

NEEDED_PERCENT = 95
TEST_TIMEOUT_S = 900  # many times what all quick tests take
UNIT_TESTS = ROOT / "tests" / "unit"
QUICK = ("-m", "not slow and not process")


def main() -> int:
    """Run what was asked for. The code as it is comes first: it must break nothing."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose names contain this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, help="chosen and printed where none is given")
    parser.add_argument("--faults", type=int, default=6000, help="after which a mutant counts as missed")
    parser.add_argument("--complete", action="store_true", help="fail where a mutant is stale or unproved")
    parser.add_argument("--generated", type=int, metavar="N", help="so many mutants that are made anew")
    requested = parser.parse_args()
    seed = requested.seed if requested.seed is not None else random.SystemRandom().randrange(1 << 32)
    began = time.monotonic()
    gone, no_test = stale(), unproved()
    if requested.generated:
        chosen = list(islice((one for one in draw(seed) if requested.only in one.name), requested.generated))
    else:
        print(*gone.values(), sep="\n", end="\n" if gone else "", file=sys.stderr)
        print(f"{len(gone)} of {len(all_mutants())} mutants are stale", file=sys.stderr)
        named = [one for name, one in all_mutants().items() if name not in gone and requested.only in name]
        chosen = [one for one in named if one.is_for_simulation or one.hostile]
    if not chosen:
        raise SystemExit(f"no mutant that is not stale has {requested.only!r} in its name")
    check_control(seed)

    def judged(mutant: Mutant) -> Outcome:
        found = _run_proof(mutant) if mutant.hostile else simulate(mutant, seed, requested.faults)
        shown = ""
        if requested.generated and found.faults is None:
            shown = f"\n{diff_of(mutant)}"
            found = found._replace(test=_test_of(mutant))
        print(f"{mutant.name}: {found.how} {found.test}{shown}", file=sys.stderr, flush=True)
        return found

    with ThreadPoolExecutor(requested.jobs) as pool:
        outcomes = list(pool.map(judged, chosen))
    lacking = {"stale": list(gone), "unproved": no_test}
    print(json.dumps(_report(seed, outcomes, time.monotonic() - began) | lacking))
    num_caught = sum(one.faults is not None for one in outcomes)
    if requested.generated:
        return 0
    is_incomplete = requested.complete and any(lacking.values())
    return 1 if is_incomplete or 100 * num_caught < NEEDED_PERCENT * len(outcomes) else 0


def _report(seed: int, outcomes: list[Outcome], elapsed_s: float) -> dict[str, object]:
    by_faults = {one.mutant.name: one.faults for one in outcomes if one.faults}
    counts = sorted(by_faults.values())
    return {
        "seed": seed,
        "mutants": len(outcomes),
        "caught": sum(one.faults is not None for one in outcomes),
        "missed": [one.mutant.name for one in outcomes if one.faults is None],
        "by_tests": {one.mutant.name: one.test for one in outcomes if one.test},
        "by_adversary_tests": sum(one.mutant.hostile for one in outcomes),
        "median_faults": statistics.median(counts) if counts else 0,
        "most_faults": counts[-1] if counts else 0,
        "elapsed_s": round(elapsed_s, 1),
        "faults_to_catch": by_faults,
    }


def _run_proof(mutant: Mutant) -> Outcome:
    """Run the adversary test that proves the check."""
    if mutant.name in unproved():
        return Outcome(mutant, None, "missed: it has no adversary test")
    test = proofs()[mutant.name]
    is_caught = bool(first_failure(mutant, test))
    return Outcome(mutant, 0 if is_caught else None, f"{'caught' if is_caught else 'missed'} by {test}")


def _test_of(mutant: Mutant) -> str:
    """Return a quick unit test that fails with the bug, if possible of its room; "" where none does."""
    room = UNIT_TESTS / mutant.path.parent.relative_to(PACKAGE)
    return first_failure(mutant, str(room), *QUICK) or first_failure(mutant, str(UNIT_TESTS), *QUICK)


def first_failure(mutant: Mutant, *tests: str) -> str:
    """Run tests with the bug up to the first that fails, and return its name; "" where none does."""
    flags = ["-q", "-x", "-p", "no:cacheprovider", "-o", "timeout=60", *tests]
    try:
        done = run_module(mutant, "pytest", *flags, timeout_s=TEST_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return ""
    named = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return named[0].split(" - ")[0].split(" ", 1)[1] if done.returncode == 1 else ""


if __name__ == "__main__":
    sys.exit(main())
