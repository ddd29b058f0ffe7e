"""What notices generated mutants: `make mutants GENERATED=n SEED=s`.

Each is simulated. What the simulation does not notice goes to the unit tests and property tests of its room,
and the unit tests that import its module. A mutant that the programs do not start with is not counted:
another is drawn in its place.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from tests.proofs.mutants.generate import diff_of, draw, operator_of
from tests.proofs.mutants.mutant import ROOT, Mutant, MutantError
from tests.proofs.mutants.prove import failing_tests, where_to_look
from tests.proofs.mutants.run import run_module
from tests.proofs.mutants.simulate import MAX_FALSE_ALARMS, SIMULATION, simulate

OUTPUT = ROOT / "build" / "generated-mutants.jsonl"
START_TIMEOUT_S = 60
TESTS_TIMEOUT_S = 300
NOT_STARTED = "does not start"
VERDICTS = (BY_SIMULATION, BY_TESTS, BY_NOTHING) = ("simulation", "tests", "nothing")


class Row(NamedTuple):
    """What noticed one mutant. `diff`: of those that the simulation does not notice."""

    name: str
    operator: str
    verdict: str
    how: str
    faults: int | None = None
    seconds: float = 0.0
    diff: str = ""


def print_verdicts(count: int, seed: int, only: str, max_faults: int, jobs: int, output: Path) -> None:
    """Print a line of JSON for each mutant, which `output` gets too, and the report on standard error."""
    drawn, lock = (one for one in draw(seed) if only in one.name), Lock()

    def rows_of_next(_: int) -> list[Row]:
        rows = []
        while not rows or rows[-1].verdict == NOT_STARTED:
            with lock:
                mutant = next(drawn, None)
            if mutant is None:
                raise MutantError(f"cannot draw {count} mutants: there are no more")
            rows.append(row_of(mutant, seed, max_faults))
        return rows

    rows = []
    output.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool, output.open("w") as file:
        for row in chain.from_iterable(pool.map(rows_of_next, range(count))):
            rows.append(row)
            line = json.dumps(row._asdict())
            print(line, flush=True)
            print(line, file=file, flush=True)
    print(*report(rows), sep="\n", file=sys.stderr)


def row_of(mutant: Mutant, seed: int, max_faults: int) -> Row:
    """Simulate a mutant, and run the tests where that does not notice it."""
    row = Row(mutant.name, operator_of(mutant), NOT_STARTED, "")
    if why_not := _why_not_started(mutant):
        return row._replace(how=why_not)
    began = time.monotonic()
    outcome = simulate(mutant, seed, max_faults)
    row = row._replace(verdict=BY_SIMULATION, how=outcome.how, faults=outcome.faults)
    if outcome.faults is None and not outcome.has_stopped_it:
        test = _noticing_test(mutant)
        how = f"{outcome.how}; {test or 'no test'}"
        row = row._replace(verdict=BY_TESTS if test else BY_NOTHING, how=how, diff=diff_of(mutant))
    return row._replace(seconds=round(time.monotonic() - began, 1))


def _why_not_started(mutant: Mutant) -> str:
    try:
        done = run_module(mutant, SIMULATION, "--help", timeout_s=START_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"no end of the imports in {START_TIMEOUT_S} s"
    return (done.stderr.splitlines() or [f"exit status {done.returncode}"])[-1] if done.returncode else ""


def _noticing_test(mutant: Mutant) -> str:
    """Return a test that fails with the mutant and not without it, or how pytest ends; "" where none does."""
    try:
        for places in where_to_look(mutant, with_model=False):
            arguments = ["-x", "-m", "not slow", *places]
            for _ in range(MAX_FALSE_ALARMS + 1):
                failed = failing_tests(mutant, *arguments, timeout_s=TESTS_TIMEOUT_S)
                if not failed:
                    break
                if not failing_tests(None, failed[0], timeout_s=TESTS_TIMEOUT_S):
                    return failed[0]
                arguments += ["--deselect", failed[0]]
    except subprocess.TimeoutExpired:
        return f"no end of {places[0]} in {TESTS_TIMEOUT_S} s"
    except SystemExit as error:
        return str(error)[-2000:]
    return ""


def report(rows: Iterable[Row]) -> list[str]:
    """Return the lines of a table by operator, and what the simulation has not noticed."""
    rows = sorted(rows, key=lambda row: (row.verdict, row.name))
    counts = Counter((row.operator, row.verdict) for row in rows)
    operators = sorted({row.operator for row in rows})
    lines = [f"{'noticed by':14}" + "".join(f"{verdict:>18}" for verdict in VERDICTS)]
    for name, added in [*((operator, [operator]) for operator in operators), ("all", operators)]:
        cells = [sum(counts[operator, verdict] for operator in added) for verdict in VERDICTS]
        percents = [f"{cell} ({100 * cell / max(1, sum(cells)):.1f} %)" for cell in cells]
        lines.append(f"{name:14}" + "".join(f"{cell:>18}" for cell in percents))
    lines += [f"not counted: {row.name}: {row.how}" for row in rows if row.verdict == NOT_STARTED]
    missed = [row for row in rows if row.diff]
    return lines + [
        f"\n{row.name}: noticed by {row.verdict}: {row.how}\n{row.diff.rstrip()}" for row in missed
    ]
