"""Runs a program with or without a mutant."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

from tests.proofs.mutants.mutant import ROOT, Mutant


def run_module(mutant: Mutant | None, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a module with its arguments. Raises TimeoutExpired where it does not end.

    The processes that it leaves are killed: the mutant may lack what ends them.
    """
    planted = [] if mutant is None else ["tests.proofs.mutants.apply", mutant.name]
    command = [sys.executable, "-m", *planted, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
