"""What the daemon's process is before it serves."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

LOOK = """
import gc
from kvxferd.cli.serve import freeze_imports
import kvxferd.daemon

before = len(gc.get_objects())
freeze_imports()
print(before, len(gc.get_objects()))
"""


def test_the_garbage_collector_does_not_look_at_what_was_imported():
    """In its own process: what is set aside stays so."""
    said = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True)
    before, after = map(int, said.stdout.split())
    assert before > 10_000
    assert after < before / 20
