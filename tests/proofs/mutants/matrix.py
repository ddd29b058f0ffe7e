"""The unit tests that notice each mutant, beside what the simulation makes of it.

A test may go when it is no mutant's only one here, and the simulation or another test notices what it does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from tests.proofs.mutants.mutant import ROOT, Mutant, all_mutants, stale
from tests.proofs.mutants.prove import failing_tests

# Half a minute alone; a mutant may have tests wait for their own limits.
TIMEOUT_S = 900


class Row(NamedTuple):
    """What becomes of one mutant. `tests` fail with it and pass without it; None: they did not end."""

    room: str
    mutant: str
    promise: str
    simulation: str
    tests: list[str] | None


def print_matrix(mutants: list[Mutant], jobs: int, simulate: Callable[[Mutant], str]) -> None:
    """Print a line of JSON for each mutant as it ends, and a table of all on standard error.

    simulate: returns what the simulation makes of a mutant.
    """
    arguments = ["-m", "not slow and not process", "--continue-on-collection-errors", *unit_tests()]
    without = set(failing_tests(None, *arguments, timeout_s=TIMEOUT_S))

    def row_of(mutant: Mutant) -> Row:
        verdict = simulate(mutant) if mutant.is_for_simulation else "not for it"
        tests: list[str] | None = None
        with suppress(subprocess.TimeoutExpired):
            tests = sorted(set(failing_tests(mutant, *arguments, timeout_s=TIMEOUT_S)) - without)
        return Row(mutant.room, mutant.name, mutant.promise, verdict, tests)

    rows = []
    with ThreadPoolExecutor(jobs) as pool:
        for row in pool.map(row_of, mutants):
            rows.append(row)
            print(json.dumps(row._asdict()), flush=True)
    print(*table(rows), sep="\n", file=sys.stderr)


def unit_tests() -> list[str]:
    """Return the folders of unit tests of the rooms that have mutants."""
    gone = stale()
    rooms = {one.room.partition("/")[0] for one in all_mutants().values() if one.name not in gone}
    return sorted(f"tests/unit/{room}" for room in rooms if (ROOT / "tests" / "unit" / room).is_dir())


def table(rows: Iterable[Row]) -> list[str]:
    """Return the lines of a table, room by room; a mutant that one test alone notices names it."""
    cells = [("room", "mutant", "simulation", "tests", "the only one")]
    for row in sorted(rows, key=lambda row: row.room):
        count = "no end" if row.tests is None else str(len(row.tests))
        alone = row.tests[0] if row.tests is not None and len(row.tests) == 1 else ""
        cells.append((row.room, row.mutant, row.simulation.partition(":")[0], count, alone))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]
