"""Descriptors of any number, and times shorter than a millisecond."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from kvxferd.fd_wait import PreciseWait, wait_readable, wait_writable

MANY = 1100
PACKAGE = Path(__file__).parents[2]


def test_what_is_there_is_found_and_what_is_not_is_waited_for() -> None:
    ours, theirs = os.pipe()
    poll = PreciseWait(ours)
    assert not poll.wait(0.0)
    assert not poll.wait(1e-4)
    assert wait_readable([ours], 0.0) == []
    assert wait_writable(theirs, 0.0)
    assert PreciseWait(theirs).wait(None, writable=True) is False, "room to write is nothing to read"
    os.write(theirs, b"x")
    assert poll.wait(None)
    assert wait_readable([ours]) == [ours]
    os.read(ours, 1)
    os.close(theirs)
    assert poll.wait(None), "the other end's end is something to read"
    assert wait_readable([ours]) == [ours]
    os.close(ours)


@pytest.mark.process
def test_descriptors_above_1023() -> None:
    code = f"""
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({2 * MANY}, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
from kvxferd.fd_wait import PreciseWait, wait_readable, wait_writable
held = [os.open("/dev/null", os.O_RDONLY) for _ in range({MANY})]
ours, theirs = os.pipe()
assert ours > 1023
os.write(theirs, b"x")
print(PreciseWait(ours).wait(1.0), wait_readable([ours]) == [ours], wait_writable(theirs))
"""
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 2 * MANY
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert said.stdout.split() == ["True"] * 3


def test_nothing_uses_select() -> None:
    """Neither what runs inside an engine nor what an engine's author copies."""
    files = [*PACKAGE.glob("kvxferd/**/*.py"), *PACKAGE.glob("examples/*.py")]
    assert [str(path) for path in files if "select.select(" in path.read_text()] == []
