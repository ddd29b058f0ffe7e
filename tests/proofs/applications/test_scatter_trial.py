"""The measurement of scatters in a GPU, over the fake driver."""

from __future__ import annotations

import pytest

from tests.support.fake_driver import FAKE
from tests.support.python_process import run_python
from tests.support.repository import ROOT


@pytest.mark.process
def test_scatters_are_measured_and_compared() -> None:
    ran = run_python("-m", "benchmarks.scatter_trial", FAKE, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0] == "copies of rows: right"
    assert sum(line.endswith("right") for line in lines[2:]) == 6


@pytest.mark.process
def test_without_a_gpu_it_says_so() -> None:
    ran = run_python("-m", "benchmarks.scatter_trial", "none", cwd=ROOT)
    assert ran.returncode == 2
    assert "were not measured" in ran.stderr
