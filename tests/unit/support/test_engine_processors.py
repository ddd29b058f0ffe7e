"""Engines of the vLLM tests stay off one core, and a machine of one core says so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.vllm_servers.processors import engine_processors, share_processors

PRINT_CORES = [sys.executable, "-c", "import os; print(*sorted(os.sched_getaffinity(0)))"]


@pytest.mark.parametrize(
    ("cores", "engines", "kept"),
    [({0, 1}, {0}, 1), ({0, 1, 2, 3}, {0, 1, 2}, 3), ({5, 2}, {2}, 5), ({3}, {3}, None)],
)
def test_one_core_is_kept_from_engines_unless_it_is_the_only_one(
    cores: set[int], engines: set[int], kept: int | None
) -> None:
    share = share_processors(cores)
    assert (share.engines, share.kept) == (engines, kept)


def test_one_core_alone_is_reported() -> None:
    assert "there is one core" in str(share_processors({3}))
    assert str(share_processors({0, 1, 2})).startswith("engines run on cores 0,1; core 2 is kept")


@pytest.mark.process
def test_what_is_started_inside_runs_there_and_what_comes_after_everywhere() -> None:
    cores = os.sched_getaffinity(0)
    with engine_processors() as share:
        inside = subprocess.run(PRINT_CORES, capture_output=True, text=True, check=True)
    after = subprocess.run(PRINT_CORES, capture_output=True, text=True, check=True)
    assert set(map(int, inside.stdout.split())) == share.engines
    assert set(map(int, after.stdout.split())) == cores == os.sched_getaffinity(0)


@pytest.mark.process
def test_the_cores_come_back_after_an_error() -> None:
    cores = os.sched_getaffinity(0)
    with pytest.raises(FileNotFoundError), engine_processors():
        subprocess.run(["/no/such/program"], check=False)
    assert os.sched_getaffinity(0) == cores
