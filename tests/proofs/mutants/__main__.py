"""`make mutants`: run the simulation with each planted bug until it breaks a promise; the last line is JSON.

A mutant counts as caught where the episode that fails with it passes without it. One that needs a lying peer,
worker or mover is proved by its adversary test instead. Exits with 1 where fewer than 95 of 100 are caught.
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

from tests.proofs.mutants.mutant import ROOT, Mutant, all_mutants, proofs
from tests.proofs.mutants.prove import run_tests

NEEDED_PERCENT = 95
CONTROL_FAULTS = 300
# Ten thousand faults take a minute on an idle core.
TIMEOUT_S = 300.0
MAX_FALSE_ALARMS = 2


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
    done = _run(command)
    if done.returncode != 0:
        raise SystemExit(f"the simulation fails without a mutant:\n{done.stdout}{done.stderr}")


def _simulate(mutant: Mutant, seed: int, max_faults: int) -> Outcome:
    """Run the simulation with the bug, from a seed of its own; from others where that finds a false alarm."""
    rng = random.Random(f"{seed} {mutant.name}")
    num_faults = 0
    for _ in range(MAX_FALSE_ALARMS + 1):
        outcome, episode = _simulate_once(mutant, rng.getrandbits(32), max_faults)
        if outcome.faults is None:
            return outcome
        num_faults += outcome.faults
        if episode is None or not _fails(episode):
            return outcome._replace(faults=num_faults)
        print(f"{mutant.name}: episode {episode} fails without it too", file=sys.stderr, flush=True)
    return Outcome(mutant, None, f"missed: {MAX_FALSE_ALARMS + 1} episodes fail without it too")


def _simulate_once(mutant: Mutant, seed: int, max_faults: int) -> tuple[Outcome, int | None]:
    """Return what became of the mutant, and the episode in which something was broken."""
    apply = [sys.executable, "-m", "tests.proofs.mutants.apply", mutant.name]
    try:
        done = _run([*apply, *_simulation(seed, max_faults)])
    except subprocess.TimeoutExpired:
        return Outcome(mutant, None, f"missed: no violation in {TIMEOUT_S:g} s of seed {seed}"), None
    lines = done.stdout.splitlines()
    if not lines:
        how = f"missed: seed {seed}: the simulation ended: {done.stderr[-2000:]}"
        return Outcome(mutant, None, how), None
    told = json.loads(lines[-1])
    if done.returncode == 0:
        return Outcome(mutant, None, f"missed: {told['faults']} faults of seed {seed}"), None
    found = next((line for line in done.stderr.splitlines() if line.startswith("episode ")), "")
    outcome = Outcome(mutant, max(1, told["faults"]), f"caught after {told['faults']} faults: {found}")
    return outcome, next(iter(told["failed_episodes"]), None)


def _fails(episode: int) -> bool:
    """Whether the episode fails without any bug: then it is the simulation's own, or a real defect."""
    return (
        _run([sys.executable, "-m", "tests.property.simulation", "--episode", str(episode)]).returncode != 0
    )


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def _run_proof(mutant: Mutant) -> Outcome:
    """Run the adversary test that proves the check."""
    test = proofs()[mutant.name]
    caught = bool(run_tests(mutant, [test]))
    return Outcome(mutant, 0 if caught else None, f"{'caught' if caught else 'missed'} by {test}")


if __name__ == "__main__":
    sys.exit(main())
