"""The list of planted bugs keeps up with the code: a change that takes a text or a test away is seen here.

Whether the bugs are noticed is the proof `mutants`, which takes long.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.proofs.mutants.mutant import ROOT, proofs, stale, unproved


def test_each_bug_can_be_planted() -> None:
    assert stale() == {}
    assert unproved() == []


@pytest.mark.slow
def test_each_test_that_notices_one_exists() -> None:
    named = set(proofs().values())
    files = sorted({test.partition("::")[0] for test in named})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert named - set(done.stdout.splitlines()) == set()
