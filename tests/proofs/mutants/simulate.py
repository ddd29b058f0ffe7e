"""What the simulation makes of a mutant."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import NamedTuple

from tests.proofs.mutants.mutant import ROOT, Mutant

CONTROL_FAULTS = 300
# Ten thousand faults take a minute on an idle core.
TIMEOUT_S = 300.0
MAX_FALSE_ALARMS = 2


class Outcome(NamedTuple):
    """What became of one mutant: `faults` until it was caught, None where it was not."""

    mutant: Mutant
    faults: int | None
    how: str


def _simulation(seed: int, faults: int) -> list[str]:
    return ["tests.property.simulation", "--faults", str(faults), "--seed", str(seed)]


def check_control(seed: int) -> None:
    """Raise SystemExit where the simulation fails without a bug: then it proves nothing."""
    command = [sys.executable, "-m", *_simulation(seed, CONTROL_FAULTS)]
    done = _run(command)
    if done.returncode != 0:
        raise SystemExit(f"the simulation fails without a mutant:\n{done.stdout}{done.stderr}")


def simulate(mutant: Mutant, seed: int, max_faults: int) -> Outcome:
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
