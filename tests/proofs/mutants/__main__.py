"""`make mutants`: run the simulation with each planted bug until it breaks a promise; the last line is JSON.

A mutant counts as caught where the episode that fails with it passes without it. One that needs a lying peer,
worker or mover is proved by its adversary test instead. Exits with 1 where fewer than 95 of 100 are caught,
and with --complete where a mutant is stale, or one that the simulation cannot notice has no test.

--matrix ROOM shows the unit tests that fail with each mutant of a folder of the package, such as core or
mover/reads, beside what the simulation makes of it: a line of JSON each, and a table on standard error.

--generated N takes N mutants that are made from the source as it is, and shows what notices each: the
simulation, only the tests, or nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.proofs.mutants.matrix import print_matrix
from tests.proofs.mutants.mutant import Mutant, all_mutants, proofs, stale, unproved
from tests.proofs.mutants.prove import first_failing_test
from tests.proofs.mutants.simulate import Outcome, check_control, simulate
from tests.proofs.mutants.verdicts import OUTPUT, print_verdicts

NEEDED_PERCENT = 95


def main() -> int:
    """Run what was asked for. The code as it is comes first: it must break nothing."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose names contain this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, help="chosen and printed where none is given")
    parser.add_argument("--faults", type=int, default=10_000, help="after which a mutant counts as missed")
    parser.add_argument("--complete", action="store_true", help="fail where a mutant is stale or unproved")
    parser.add_argument("--matrix", metavar="ROOM", help="which unit tests notice the mutants of this folder")
    parser.add_argument("--generated", type=int, metavar="N", help="so many mutants that are made anew")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="for the lines of --generated")
    requested = parser.parse_args()
    seed = requested.seed if requested.seed is not None else random.SystemRandom().randrange(1 << 32)
    began = time.monotonic()
    if requested.generated:
        print(f"seed {seed}", file=sys.stderr, flush=True)
        check_control(seed)
        print_verdicts(
            requested.generated, seed, requested.only, requested.faults, requested.jobs, requested.output
        )
        return 0
    chosen, lacking = _choose(requested.only, requested.matrix)
    check_control(seed)
    if requested.matrix:
        print_matrix(chosen, requested.jobs, lambda one: simulate(one, seed, requested.faults).how)
        return 0
    simulated = [mutant for mutant in chosen if mutant.is_for_simulation]
    with ThreadPoolExecutor(requested.jobs) as pool:
        running = [pool.submit(simulate, one, seed, requested.faults) for one in simulated]
        running += [pool.submit(_run_proof, one) for one in chosen if one.hostile]
        outcomes = []
        for future in running:
            outcomes.append(outcome := future.result())
            print(f"{outcome.mutant.name}: {outcome.how}", file=sys.stderr, flush=True)
    print(json.dumps(_report(seed, outcomes, chosen, time.monotonic() - began) | lacking))
    num_caught = sum(one.faults is not None for one in outcomes)
    is_incomplete = requested.complete and any(lacking.values())
    return 1 if is_incomplete or 100 * num_caught < NEEDED_PERCENT * len(outcomes) else 0


def _choose(only: str, room: str | None) -> tuple[list[Mutant], dict[str, list[str]]]:
    """Return the mutants to run, and the names of those that are stale or unproved, which are printed too.

    Raises SystemExit where there is none to run.
    """
    gone, no_test = stale(), unproved()
    print(*gone.values(), sep="\n", end="\n" if gone else "", file=sys.stderr)
    print(f"{len(gone)} of {len(all_mutants())} mutants are stale, {len(no_test)} unproved", file=sys.stderr)
    named = [one for one in all_mutants().values() if one.name not in gone and only in one.name]
    chosen = [one for one in named if room is None or f"{one.room}/".startswith(f"{room}/")]
    if not chosen:
        raise SystemExit(f"no mutant of {room or 'any room'} that is not stale has {only!r} in its name")
    return chosen, {"stale": list(gone), "unproved": no_test}


def _report(seed: int, outcomes: list[Outcome], chosen: list[Mutant], elapsed_s: float) -> dict[str, object]:
    by_faults = {one.mutant.name: one.faults for one in outcomes if one.faults}
    counts = sorted(by_faults.values())
    return {
        "seed": seed,
        "mutants": len(outcomes),
        "caught": sum(one.faults is not None for one in outcomes),
        "missed": [one.mutant.name for one in outcomes if one.faults is None],
        "by_adversary_tests": sum(one.mutant.hostile for one in outcomes),
        "not_for_simulation": [one.name for one in chosen if one.unseen],
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
    caught = bool(first_failing_test(mutant, [test]))
    return Outcome(mutant, 0 if caught else None, f"{'caught' if caught else 'missed'} by {test}")


if __name__ == "__main__":
    sys.exit(main())
