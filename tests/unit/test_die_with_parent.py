"""A module that runs as a child: it has its arguments, and does not run once its parent is dead."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from kvxferd.die_with_parent import module_command

pytestmark = pytest.mark.process


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment with a module `probe`."""
    (tmp_path / "probe.py").write_text("import sys\nprint(__name__, *sys.argv[1:])\n")
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def run(command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)


def test_a_module_runs_as_by_its_name(environ: dict[str, str]) -> None:
    ran = run(module_command("probe", "one", "--two"), environ)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "__main__ one --two\n", "")


def test_a_child_whose_parent_has_died_already_runs_nothing(environ: dict[str, str]) -> None:
    """Its interpreter starts in some 50 ms; a parent that is killed in them would leave the child."""
    me = str(os.getpid())
    command = ["1" if word == me else word for word in module_command("probe")]
    assert "1" in command
    ran = run(command, environ)
    assert (ran.returncode, ran.stdout) == (1, "")
