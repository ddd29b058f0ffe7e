"""The program of the tutorial on tensors, as it is pasted from its page."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.python_process import run_python
from tests.support.repository import ROOT

PAGE = ROOT / "docs" / "tutorial" / "tensors.md"


def run(program: str, socket: str, tmp_path: Path) -> str:
    """Paste the program into a file and run it, as the page says. Returns what it prints."""
    path = tmp_path / "engine.py"
    path.write_text(program)
    path_names = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(path_names)}
    ran = run_python(path, socket, env=environ, timeout_s=100)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
