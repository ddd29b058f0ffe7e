"""What killed parents leave in /dev/shm: the next one removes it, and nothing of those that live."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PARENT = "from kvxferd.mover.shm import make_shm_directory; make_shm_directory(); print(flush=True); input()"


def parent() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "\n"
    return process


def directory_of(process: subprocess.Popen[str]) -> Path:
    return Path(f"/dev/shm/kvxferd-movers-{process.pid}")


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm here")
def test_the_directory_of_a_killed_parent_goes_with_the_next_one_and_a_living_ones_stays():
    killed, living = parent(), parent()
    (directory_of(killed) / "ucx_left_behind").write_bytes(b"x")
    assert directory_of(living).is_dir()
    killed.kill()
    killed.wait()
    assert directory_of(killed).is_dir()
    following = parent()
    try:
        assert not directory_of(killed).exists()
        assert directory_of(living).is_dir()
        assert directory_of(following).is_dir()
    finally:
        for process in (living, following):
            process.kill()
            process.wait()
            directory_of(process).rmdir()
