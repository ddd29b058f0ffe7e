"""Objects for child processes, which import them by name."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from kvxferd.errors import BusyError, Code, EngineError


class Counter:
    """Counts, and misbehaves on demand."""

    def __init__(self, start: int = 0, progressing: int = 0) -> None:
        if start < 0:
            raise EngineError("cannot count: it starts below zero", Code.BAD_REQUEST)
        self.number = start
        self._progressing = progressing
        self._num_steps = 0

    def add(self, number: int) -> int:
        self.number += number
        return self.number

    def progress(self) -> bool:
        """Return False at the last step."""
        self._num_steps += self._num_steps < self._progressing
        return self._num_steps < self._progressing

    def num_steps(self) -> int:
        return self._num_steps

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def refuse(self) -> None:
        raise BusyError("cannot count: it counts already; try again", 1.0)

    def divide(self) -> float:
        return self.number / 0

    def unpicklable(self) -> Any:
        return lambda: None

    def say_and_die(self, words: str) -> None:
        print(words, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self, status: int | str) -> None:
        sys.exit(status)

    def hang(self) -> None:
        time.sleep(1000)
