"""What the simulation makes of a mutant."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from typing import NamedTuple

from tests.proofs.mutants.mutant import ROOT, Mutant

CONTROL_FAULTS = 300
START_S, S_PER_FAULT = 300.0, 0.5  # many times what a busy machine takes
MAX_FALSE_ALARMS = 2
DENSE = ("--episode-faults", 350)  # nearly four times as many faults in a second, that meet more often


class Outcome(NamedTuple):
    """What became of one mutant: `faults` until it was caught, None where it was not.

    `test`: one that fails with it, where that was asked for.
    """

    mutant: Mutant
    faults: int | None
    how: str
    test: str = ""


def run_module(mutant: Mutant | None, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a module with its arguments, with or without a mutant. Raises TimeoutExpired where it does not end.

    The processes that it leaves are killed: the mutant may lack what ends them.
    """
    planted = [] if mutant is None else ["tests.proofs.mutants.apply", mutant.name]
    command = [sys.executable, "-m", *planted, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def check_control(seed: int) -> None:
    """Raise SystemExit where the simulation fails without a bug: then it proves nothing."""
    done = _run(None, "--faults", CONTROL_FAULTS, "--seed", seed)
    if done.returncode != 0:
        raise SystemExit(f"the simulation fails without a mutant:\n{done.stdout}{done.stderr}")


def simulate(mutant: Mutant, seed: int, max_faults: int) -> Outcome:
    """Run the simulation with the bug, first a tenth of the faults as usual, then the others dense.

    Seeds are the mutant's own, and others where one finds a false alarm. `Outcome.how` begins with "caught
    after", "missed:", "hangs:" or "ends:", the last where it cannot go on.
    """
    rng = random.Random(f"{seed} {mutant.name}")
    few = max_faults // 10
    outcome = _simulate_part(mutant, rng, few)
    if not outcome.how.startswith("missed: no violation"):
        return outcome
    outcome = _simulate_part(mutant, rng, max_faults - few, *DENSE)
    return outcome if outcome.faults is None else outcome._replace(faults=few + outcome.faults)


def _simulate_part(mutant: Mutant, rng: random.Random, max_faults: int, *density: object) -> Outcome:
    num_faults = 0
    for _ in range(MAX_FALSE_ALARMS + 1):
        outcome, episode = _simulate_once(mutant, rng.getrandbits(32), max_faults, *density)
        if outcome.faults is None:
            return outcome
        num_faults += outcome.faults
        # One that fails without any bug too is the simulation's own, or a real defect.
        if episode is None or not _run(None, "--episode", episode, *density).returncode:
            return outcome._replace(faults=num_faults)
        print(f"{mutant.name}: episode {episode} fails without it too", file=sys.stderr, flush=True)
    return Outcome(mutant, None, f"missed: {MAX_FALSE_ALARMS + 1} episodes fail without it too")


def _simulate_once(
    mutant: Mutant, seed: int, max_faults: int, *density: object
) -> tuple[Outcome, int | None]:
    """Return what became of the mutant, and the episode in which something was broken."""
    arguments = ("--faults", max_faults, "--seed", seed, "--jobs", 1, *density)
    try:
        done = _run(mutant, *arguments, max_faults=max_faults)
    except subprocess.TimeoutExpired as error:
        return Outcome(mutant, None, f"hangs: no violation in {error.timeout:g} s of seed {seed}"), None
    lines = done.stdout.splitlines()
    if not lines and "Error: " in done.stderr:  # the mutant cannot be loaded
        return Outcome(mutant, 1, f"caught at once: {done.stderr.splitlines()[-1]}"), None
    if not lines:
        return Outcome(mutant, None, f"ends: seed {seed}: {done.stderr[-2000:]}"), None
    told = json.loads(lines[-1])
    if done.returncode == 0:
        return Outcome(mutant, None, f"missed: no violation in {told['faults']} faults of seed {seed}"), None
    found = next((line for line in done.stderr.splitlines() if line.startswith("episode ")), "")
    outcome = Outcome(mutant, max(1, told["faults"]), f"caught after {told['faults']} faults: {found}")
    return outcome, next(iter(told["failed_episodes"]), None)


def _run(
    mutant: Mutant | None, *arguments: object, max_faults: int = CONTROL_FAULTS
) -> subprocess.CompletedProcess[str]:
    timeout_s = START_S + S_PER_FAULT * max_faults
    return run_module(mutant, "tests.simulation", *map(str, arguments), timeout_s=timeout_s)
