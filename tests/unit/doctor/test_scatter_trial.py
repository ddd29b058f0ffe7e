"""The measurement of scatters in a GPU, over the fake driver."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.fake_driver import FAKE

pytestmark = pytest.mark.process


def test_scatters_are_measured_and_compared() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "kvxferd.doctor.scatter_trial", FAKE],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0] == "copies of rows: right"
    assert sum(line.endswith("right") for line in lines[2:]) == 6


def test_without_a_gpu_it_says_so() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "kvxferd.doctor.scatter_trial", "none"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 2
    assert "were not measured" in ran.stderr
