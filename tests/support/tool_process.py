"""A tool of the command line as a process: its temporary directory, and what it leaves behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.nodes.processes import lives, started_with
from tests.support.nodes.waiting import comes_true

# A small demo's flags.
DEMO = (
    *("--prefill-tp", "2", "--prefill-pp", "1", "--prefill-block-tokens", "8"),
    *("--decode-tp", "1", "--decode-block-tokens", "16"),
    *("--layers", "2", "--heads", "2", "--head-dim", "16", "--requests", "3", "--tokens", "70"),
)


@contextmanager
def tool_directory() -> Iterator[Path]:
    """Make a tool's temporary directory, and remove it; short, for Unix sockets lie below it."""
    path = Path(tempfile.mkdtemp(prefix="kvx", dir="/tmp"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def start_tool(place: Path, verb: str, *flags: str, **environ: str) -> subprocess.Popen[str]:
    """Start `kvxferd VERB`; its own processes get `place` as their temporary directory too."""
    return subprocess.Popen(
        [sys.executable, "-m", "kvxferd.cli", verb, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(place)} | environ,
    )


def left_behind(place: Path) -> list[str]:
    """Return the files there, and the commands of processes that were started with it."""
    return [*map(str, place.iterdir()), *started_with("TMPDIR", place).values()]


def await_end(pid: int, limit_s: float = 20.0) -> None:
    """Wait until the process runs no more; one that does not end is killed, and fails the test."""
    if not comes_true(lambda: not lives(pid), limit_s):
        os.kill(pid, signal.SIGKILL)
        raise AssertionError("it lives on")
