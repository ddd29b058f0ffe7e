"""What the movers' parent and its movers write to standard error."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvxferd.mover.supervisor.forkserver_client import _stderr_pipe

pytestmark = pytest.mark.process

CODE = """
import logging, os, sys

logging.basicConfig(stream=sys.stderr)
for number in range(40_000):
    logging.warning("line %d %s", number, "x" * 100)
raise RuntimeError("lost")
"""


def test_a_mover_loses_lines_rather_than_wait_for_a_daemon_that_is_stopped() -> None:
    reading, writing = _stderr_pipe()
    try:
        process = subprocess.Popen([sys.executable, "-c", CODE], stdout=writing, stderr=writing)
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()
        os.set_blocking(reading, False)
        assert os.read(reading, 4096).startswith(b"WARNING:root:line 0 ")
    finally:
        os.close(reading)
        os.close(writing)
