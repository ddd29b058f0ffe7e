"""The thread that copies from chunks into blocks, as data: each copy takes time, and the engine goes on."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from kvxferd.mover.chunks.scatterer import ScatterJob

if TYPE_CHECKING:
    from tests.property.simulation.mover import Mover


class CopyThread:
    """A `Scatterer`. The copies of a mover that is stopped wait, as its thread does."""

    def __init__(self, mover: Mover, copy_s: float) -> None:
        """`copy_s`: how long one copy takes."""
        self._mover = mover
        self._copy_s = copy_s
        self._jobs: deque[ScatterJob] = deque()
        self._is_due = False

    def start(self, job: ScatterJob) -> None:
        """Queue a job."""
        self._jobs.append(job)
        self._copy_soon()

    def step(self) -> bool:
        """Leave the work to the thread."""
        return False

    def help(self) -> bool:
        """Leave the work to the thread."""
        return False

    def close(self) -> None:
        """Drop all jobs: the process is gone."""
        self._jobs.clear()

    def _copy_soon(self) -> None:
        if self._jobs and not self._is_due:
            self._is_due = True
            self._mover.after(self._copy_s, self._copy)

    def _copy(self) -> None:
        self._is_due = False
        if not self._jobs:
            return
        memory = self._mover.bound
        assert memory is not None
        before = np.array(memory.bytes)
        self._jobs[0].run_piece()
        for offset in np.flatnonzero(before != np.frombuffer(memory.bytes, dtype=np.uint8)).tolist():
            self._mover.on_write(memory, offset, 1)
        if self._jobs[0].is_over:
            self._jobs.popleft()
        self._copy_soon()
        self._mover.wake()
