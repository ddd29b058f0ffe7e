"""python -m tests.proofs.mutants.prove [--only NAME] [--jobs N]: find a test that fails with each mutant.

Each proof is written to proofs/tests.toml. Where no test fails, a test is missing, or nothing needs the code.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor, as_completed

from tests.proofs.mutants.mutant import HERE, ROOT, Mutant, all_mutants, proofs, stale
from tests.proofs.mutants.run import run_module

TIMEOUT_S = 300
_NO_TESTS = 5  # what pytest returns where its flags leave none
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)


def main() -> None:
    """Print each proof, and write them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose names contain this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="those too that have a proof")
    parser.add_argument("--hostile", action="store_true", help="those alone that need a liar")
    parser.add_argument("--model", action="store_true", help="try the model too, which takes minutes")
    requested = parser.parse_args()
    found, stale_ones = proofs(), stale()
    chosen = [
        mutant
        for mutant in all_mutants().values()
        if mutant.name not in stale_ones
        and requested.only in mutant.name
        and (requested.again or mutant.name not in found)
        and (mutant.hostile or not requested.hostile)
    ]
    with ThreadPoolExecutor(requested.jobs) as pool:
        running = {pool.submit(find_proof, mutant, requested.model): mutant for mutant in chosen}
        for future in as_completed(running):
            mutant, test = running[future], future.result()
            print(f"{mutant.name}: {test or 'NO TEST NOTICES IT'}", flush=True)
            if test:
                write(mutant, test)


def write(proved: Mutant, test: str) -> None:
    """Write one proof more, in the order of the lists."""
    proofs.cache_clear()
    found = {**proofs(), proved.name: test}
    lines = [f'{name} = "{found[name]}"' for name in all_mutants() if name in found]
    text = "# The test that fails with each mutant: written by tests/proofs/mutants/prove.py.\n"
    (HERE / "proofs" / "tests.toml").write_text(text + "\n".join(lines) + "\n")


def find_proof(mutant: Mutant, with_model: bool) -> str:
    """Return a test that fails with the mutant; "" where none of its room does."""
    for places in where_to_look(mutant, with_model):
        if test := first_failing_test(mutant, places):
            return test
    return ""


def where_to_look(mutant: Mutant, with_model: bool) -> list[list[str]]:
    """Return files and folders of tests: the likely ones, the room, and others that import the module."""
    unit = ROOT / "tests" / "unit"
    room = next(path for path in (unit / mutant.room, *(unit / mutant.room).parents) if path.is_dir())
    word = mutant.path.stem.split("_")[0].rstrip("s")
    likely = sorted(str(p.relative_to(ROOT)) for p in room.glob(f"test_*{word}*.py"))
    imports = re.compile(rf"^\s*(?:from|import) {re.escape(mutant.module)}\b", re.MULTILINE)
    others = [path for path in sorted(unit.rglob("test_*.py")) if room not in path.parents]
    elsewhere = [str(p.relative_to(ROOT)) for p in others if imports.search(p.read_text())]
    properties = f"tests/property/{mutant.room.partition('/')[0]}"
    elsewhere += [properties] if (ROOT / properties).is_dir() else []
    wide = ["tests/property/model/test_model.py"] if with_model else []
    found = (likely, [str(room.relative_to(ROOT))], elsewhere, wide)
    return [places for places in found if places]


def first_failing_test(mutant: Mutant, places: list[str]) -> str:
    """Return the first of these tests that fails with the mutant; "" where none does, or they do not end."""
    try:
        return next(iter(failing_tests(mutant, "-x", *places, timeout_s=TIMEOUT_S)), "")
    except subprocess.TimeoutExpired:
        return ""


def failing_tests(mutant: Mutant | None, *arguments: str, timeout_s: float) -> list[str]:
    """Return the tests that fail with the mutant, or without any.

    arguments: pytest's own, and the places of the tests.

    Raises TimeoutExpired where they do not end, SystemExit where pytest cannot run them.
    """
    flags = ["-q", "-p", "no:cacheprovider", "-o", "timeout=60", "-rfE", "--tb=no"]
    done = run_module(mutant, "pytest", *flags, *arguments, timeout_s=timeout_s)
    failed = _FAILED.findall(done.stdout)
    if (done.returncode not in (0, _NO_TESTS)) != bool(failed):
        name = "no mutant" if mutant is None else mutant.name
        raise SystemExit(f"{name}: pytest ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return failed


if __name__ == "__main__":
    main()
