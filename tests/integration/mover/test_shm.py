"""What killed parents leave in /dev/shm: the next one removes it, and nothing of those that live."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# In a directory of the test's own: in /dev/shm any forkserver on this machine may be the next one.
PARENT = """
import pathlib, sys
from kvxferd.mover import shm
shm._SHM = pathlib.Path(sys.argv[1])
shm.make_shm_directory()
print(flush=True)
input()
"""


def parent(shm: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(shm)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "\n"
    return process


def directory_of(shm: Path, process: subprocess.Popen[str]) -> Path:
    return shm / f"kvxferd-movers-{process.pid}"


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
