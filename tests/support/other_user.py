"""Processes of another user, for tests of who may what. They need root, to become somebody else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65_534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")

# Everything is imported before the change of user, who may not be able to read where it lies.
_SCRIPT = """
import os, select, socket, struct, sys, time
{imports}
os.setgroups([])
os.setresgid({gid}, {gid}, {gid})
os.setresuid({uid}, {uid}, {uid})
{body}
"""


def script(body: str, uid: int = NOBODY, gid: int = NOBODY, imports: str = "") -> list[str]:
    """A command that runs the body as that user."""
    return [sys.executable, "-c", _SCRIPT.format(imports=imports, uid=uid, gid=gid, body=body)]


def run_as_nobody(body: str, *arguments: str, imports: str = "") -> str:
    """What the body prints, run as that user. It finds the arguments in sys.argv[1:]."""
    command = [*script(body, imports=imports), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@contextmanager
def open_directory() -> Iterator[Path]:
    """A short directory that everybody may enter."""
    path = Path(tempfile.mkdtemp(prefix="kvxferd-"))
    path.chmod(0o711)
    try:
        yield path
    finally:
        shutil.rmtree(path)
