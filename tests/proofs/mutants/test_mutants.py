"""Every mutant applies to the code as it is, and a planted bug is noticed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.proofs.mutants.mutant import ROOT, Mutant, MutantError, all_mutants, plant, proofs


def test_each_mutant_changes_code_that_compiles() -> None:
    for mutant in all_mutants().values():
        assert mutant.new.strip() != mutant.old.strip(), mutant.name
        compile(mutant.mutated_source(), mutant.file, "exec")


def test_each_that_the_simulation_cannot_notice_has_a_test() -> None:
    assert len(all_mutants()) >= 60
    assert proofs().keys() <= all_mutants().keys()
    unproved = [one.name for one in all_mutants().values() if not one.is_for_simulation]
    assert [name for name in unproved if name not in proofs()] == []
    for name, test in proofs().items():
        assert (ROOT / test.partition("::")[0]).exists(), f"the proof of {name} is gone"


def test_text_that_is_not_there_is_an_error() -> None:
    mutant = Mutant(name="none", file="kvxferd/core/pulls.py", promise="", old="no such text", new="")
    with pytest.raises(MutantError, match="0 times"):
        mutant.mutated_source()


def test_a_module_that_is_loaded_is_an_error() -> None:
    mutant = Mutant(name="late", file="tests/proofs/mutants/mutant.py", promise="", old="a", new="b")
    with pytest.raises(MutantError, match="is loaded already"):
        plant(mutant)


def test_a_planted_bug_is_noticed() -> None:
    name = "client-delivers-after-a-failure"
    apply = [sys.executable, "-m", "tests.proofs.mutants.apply", name]
    command = [*apply, "pytest", "-q", "-p", "no:cacheprovider", proofs()[name]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
