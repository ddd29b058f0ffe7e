"""Movers where there is no torch, as in the image: NIXL names it, and its data path does without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.nodes.fleet import Fleet
from tests.support.nodes.requests import publish, pull_and_check

# Python runs this before anything else of a process whose PYTHONPATH has its folder: the daemon's, the
# forkserver's, and through that the movers'.
SITE = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTorch())
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def test_the_stand_in_for_its_absence_is_one(environment: dict[str, str]) -> None:
    code = "import importlib.util; importlib.util.find_spec('torch')"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert "No module named 'torch'" in done.stderr


def test_movers_move_bytes_without_torch(fleet: Fleet, environment: dict[str, str]) -> None:
    daemon = fleet.daemon("node", PYTHONPATH=environment["PYTHONPATH"])
    source, sink = fleet.pair(daemon)
    pull_and_check([sink], publish([source], 1), 1)
