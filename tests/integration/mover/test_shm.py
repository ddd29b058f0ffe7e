"""What killed parents leave in /dev/shm: the next one removes it, and nothing of those that live."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvxferd.mover import shm

# In a directory of the test's own: in /dev/shm any forkserver on this machine may be the next one.
PARENT = """
import pathlib, sys
from kvxferd.mover import shm
shm._SHM = pathlib.Path(sys.argv[1])
shm.make_shm_directory()
print(flush=True)
input()
"""


def parent(where: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(where)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "\n"
    return process


def directory_of(where: Path, process: subprocess.Popen[str]) -> Path:
    return where / f"kvxferd-movers-{process.pid}"


def test_a_killed_parents_directory_goes_with_the_next_one_and_a_living_ones_stays(tmp_path: Path) -> None:
    killed, living = parent(tmp_path), parent(tmp_path)
    (directory_of(tmp_path, killed) / "ucx_left_behind").write_bytes(b"x")
    assert directory_of(tmp_path, living).is_dir()
    killed.kill()
    killed.wait()
    assert directory_of(tmp_path, killed).is_dir()
    following = parent(tmp_path)
    try:
        assert not directory_of(tmp_path, killed).exists()
        assert directory_of(tmp_path, living).is_dir()
        assert directory_of(tmp_path, following).is_dir()
    finally:
        for process in (living, following):
            process.kill()
            process.wait()


def test_what_a_dead_mover_left_goes_and_what_a_living_one_has_open_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "_SHM", tmp_path)
    directory = tmp_path / f"kvxferd-movers-{os.getpid()}"
    directory.mkdir()
    (directory / "left").write_bytes(b"x")
    with (directory / "open").open("wb"):
        shm.remove_left_files([os.getpid()])
        assert [path.name for path in directory.iterdir()] == ["open"]
    shm.remove_left_files([os.getpid()])
    assert not list(directory.iterdir())
