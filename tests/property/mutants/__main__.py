"""`make mutants`: run the simulation with each planted bug until it breaks a promise; the last line is JSON.

A mutant that needs a lying peer, worker or mover is proved by its adversary test instead. Exits with 1 where
fewer than 95 of 100 are caught.
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
from typing import NamedTuple

from tests.property.mutants.mutant import ROOT, Mutant, all_mutants, proofs
from tests.property.mutants.prove import run_tests

NEEDED_PERCENT = 95
CONTROL_FAULTS = 300
# Ten thousand faults take a minute on an idle core.
TIMEOUT_S = 300.0


class Outcome(NamedTuple):
    """What became of one mutant: `faults` until it was caught, None where it was not."""

    mutant: Mutant
    faults: int | None
    how: str


def main() -> int:
    """Run what was asked for. The code as it is comes first: it must break nothing."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose names contain this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, help="chosen and printed where none is given")
    parser.add_argument("--faults", type=int, default=10_000, help="after which a mutant counts as missed")
    asked = parser.parse_args()
    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(1 << 32)
    began = time.monotonic()
    _check_control(seed)
    chosen = [mutant for mutant in all_mutants().values() if asked.only in mutant.name]
    simulated = [mutant for mutant in chosen if mutant.is_for_simulation]
    with ThreadPoolExecutor(asked.jobs) as pool:
        running = [pool.submit(_simulate, one, seed, asked.faults) for one in simulated]
        running += [pool.submit(_run_proof, one) for one in chosen if one.hostile]
        outcomes = []
        for future in running:
            outcomes.append(outcome := future.result())
            print(f"{outcome.mutant.name}: {outcome.how}", file=sys.stderr, flush=True)
    print(json.dumps(_report(seed, outcomes, chosen, time.monotonic() - began)))
    num_caught = sum(one.faults is not None for one in outcomes)
    return 0 if 100 * num_caught >= NEEDED_PERCENT * len(outcomes) else 1


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


def _simulation(seed: int, faults: int) -> list[str]:
    return ["tests.property.simulation", "--faults", str(faults), "--seed", str(seed)]


def _check_control(seed: int) -> None:
    """Raise SystemExit where the simulation fails without a bug: then it proves nothing."""
    command = [sys.executable, "-m", *_simulation(seed, CONTROL_FAULTS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the simulation fails without a mutant:\n{done.stdout}{done.stderr}")


def _simulate(mutant: Mutant, seed: int, max_faults: int) -> Outcome:
    """Run the simulation with the bug, from a seed of its own."""
    own_seed = random.Random(f"{seed} {mutant.name}").getrandbits(32)
    apply = [sys.executable, "-m", "tests.property.mutants.apply", mutant.name]
    command = [*apply, *_simulation(own_seed, max_faults)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Outcome(mutant, None, f"missed: no violation in {TIMEOUT_S:g} s of seed {own_seed}")
    lines = done.stdout.splitlines()
    if not lines:
        return Outcome(mutant, None, f"missed: seed {own_seed}: the simulation ended: {done.stderr[-2000:]}")
    told = json.loads(lines[-1])
    if done.returncode == 0:
        return Outcome(mutant, None, f"missed: {told['faults']} faults of seed {own_seed}")
    episode = next((line for line in done.stderr.splitlines() if line.startswith("episode ")), "")
    return Outcome(mutant, max(1, told["faults"]), f"caught after {told['faults']} faults: {episode}")


def _run_proof(mutant: Mutant) -> Outcome:
    """Run the adversary test that proves the check."""
    test = proofs()[mutant.name]
    caught = bool(run_tests(mutant, [test]))
    return Outcome(mutant, 0 if caught else None, f"{'caught' if caught else 'missed'} by {test}")


if __name__ == "__main__":
    sys.exit(main())
