"""A planted bug is noticed, and what cannot be planted is named."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.proofs.mutants.mutant import ROOT, Mutant, MutantError, all_mutants, plant, proofs
from tests.proofs.mutants.verdicts import VERDICTS, print_verdicts

NOTICED = "client-delivers-after-a-failure"


def test_each_mutant_changes_something() -> None:
    assert len(all_mutants()) >= 60
    assert [one.name for one in all_mutants().values() if one.new.strip() == one.old.strip()] == []
    assert proofs().keys() <= all_mutants().keys()


@pytest.mark.parametrize("old", ["no such text", "from __future__ import annotations"])
def test_text_that_does_not_stand_once_is_stale(old: str) -> None:
    mutant = Mutant(name="none", promise="", old=old, new="")
    with pytest.raises(MutantError, match=r"none is stale: its text stands \d+ times"):
        mutant.mutated_source()


def test_a_module_that_is_loaded_is_an_error() -> None:
    mutant = all_mutants()[NOTICED]
    importlib.import_module(mutant.module)
    with pytest.raises(MutantError, match="is loaded already"):
        plant(mutant)


def test_a_planted_bug_is_noticed() -> None:
    apply = [sys.executable, "-m", "tests.proofs.mutants.apply", NOTICED]
    command = [*apply, "pytest", "-q", "-p", "no:cacheprovider", proofs()[NOTICED]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stdout + done.stderr


def test_a_generated_mutant_has_a_verdict(tmp_path: Path) -> None:
    output = tmp_path / "mutants.jsonl"
    print_verdicts(1, seed=20261124, only="", max_faults=100, jobs=1, output=output)
    row = json.loads(output.read_text().splitlines()[-1])  # those before it do not start
    assert row["verdict"] in VERDICTS
    assert bool(row["diff"]) == (row["verdict"] != VERDICTS[0])
