"""A process that runs one checkout's code and measures a batch whenever the caller asks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any


class CheckoutProcess:
    """Runs `script --be PATH`, which measures a batch for each line that it reads and prints JSON."""

    def __init__(self, stack: ExitStack, script: Path, path: Path, options: Sequence[str] = ()) -> None:
        self.path = path
        process = subprocess.Popen(
            [sys.executable, str(script), "--be", str(path), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(path), "PATH": os.environ["PATH"]},
            cwd=path,
        )
        stack.callback(process.wait)
        assert process.stdin is not None
        assert process.stdout is not None
        stack.callback(process.stdin.close)
        self._stdin: IO[str] = process.stdin
        self._stdout: IO[str] = process.stdout

    def read_line(self) -> str:
        """Return its next line. Raises RuntimeError if the process has ended."""
        if not (line := self._stdout.readline()):
            raise RuntimeError(f"{self.path} cannot be measured: see above")
        return line

    def measure_batch(self) -> Any:
        """Have it measure one batch; return what it printed."""
        self._stdin.write("go\n")
        self._stdin.flush()
        return json.loads(self.read_line())
