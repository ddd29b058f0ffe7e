"""python -m tests.proofs.mutants.prove [--only NAME] [--jobs N]: find a test that fails with each mutant.

Each proof is written to proofs/tests.toml. Where no test fails, a test is missing, or nothing needs the code.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.proofs.mutants.mutant import HERE, ROOT, Mutant, all_mutants, proofs

TIMEOUT_S = 300
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def main() -> None:
    """Print each proof, and write them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose names contain this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="those too that have a proof")
    parser.add_argument("--hostile", action="store_true", help="those alone that need a liar")
    parser.add_argument("--model", action="store_true", help="try the model too, which takes minutes")
    asked = parser.parse_args()
    found = dict(proofs())
    chosen = [
        mutant
        for mutant in all_mutants().values()
        if asked.only in mutant.name
        and (asked.again or mutant.name not in found)
        and (mutant.hostile or not asked.hostile)
    ]
    with ThreadPoolExecutor(asked.jobs) as pool:
        running = {pool.submit(find_proof, mutant, asked.model): mutant for mutant in chosen}
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
    for places in _where_to_look(mutant, with_model):
        if test := run_tests(mutant, places):
            return test
    return ""


def _where_to_look(mutant: Mutant, with_model: bool) -> list[list[str]]:
    """Return folders and files of tests, the likely ones first."""
    path = Path(mutant.file)
    room = Path("tests/unit", *path.parts[1:-1])
    word = path.stem.split("_")[0].rstrip("s")
    likely = sorted(str(p.relative_to(ROOT)) for p in (ROOT / room).glob(f"test_*{word}*.py"))
    wide = ["tests/property/model/test_model.py"] if with_model else []
    return [places for places in (likely, [str(room)], wide) if places]


def run_tests(mutant: Mutant, places: list[str]) -> str:
    """Return the first of these tests that fails with the mutant, or does not end."""
    command = [sys.executable, "-m", "tests.proofs.mutants.apply", mutant.name, "pytest", "-x", "-q"]
    command += ["-p", "no:cacheprovider", "-o", "timeout=60", "-rfE", "--tb=no", *places]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return ""
    if done.returncode == 0:
        return ""
    failed = _FAILED.search(done.stdout)
    if failed is None:
        raise SystemExit(f"{mutant.name}: pytest ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return failed[1]


if __name__ == "__main__":
    main()
