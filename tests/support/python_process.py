"""Python as a process of its own: for what ends a process, holds it, or changes it for good."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def run_python(
    *arguments: str | Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run this interpreter; return how it ended, and what it printed."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def run_kvxferd(*arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `kvxferd ARGUMENTS` with this addition to the environment."""
    return run_python("-m", "kvxferd.cli", *arguments, env=os.environ | environ, timeout_s=60)
