"""Cuts one pull's runs into posts that take a short time each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvxferd.mover.transport.runs import split_long_runs
from kvxferd.plan import Runs

# A descriptor costs about as much as copying 16 KiB, scattered 4 KiB blocks over CMA included.
DESCRIPTOR_COST_BYTES = 16 << 10
MAX_DESCRIPTORS = 2048
# Less than half a millisecond, at the 5 GB/s of two processes on one machine.
SHORT_BYTES = 2 << 20
# A longer run is cut, so that no post is larger than its budget by more than one run.
MAX_RUN_BYTES = 4 << 20


class Slicer:
    """The runs of one remote rank, handed out in order, a slice at a time."""

    def __init__(self, runs: Runs) -> None:
        self.num_runs = len(runs.length)
        self.num_bytes = int(runs.length.sum())
        self._runs = runs if self.num_bytes <= MAX_RUN_BYTES else split_long_runs(runs, MAX_RUN_BYTES)
        # How long all of it takes, as bytes. Most pulls are one slice: the cost of each run is not needed.
        self.cost_bytes = self.num_bytes + len(self._runs.length) * DESCRIPTOR_COST_BYTES
        self._cumulative_cost: npt.NDArray[np.uint64] | None = None
        self._next = 0

    @property
    def is_empty(self) -> bool:
        """Whether everything was handed out."""
        return self._next >= len(self._runs.length)

    def next_slice(self, budget_bytes: int) -> Runs:
        """Return the next slice, which has at least one descriptor."""
        start = self._next
        if not start and self.cost_bytes <= budget_bytes and len(self._runs.length) <= MAX_DESCRIPTORS:
            self._next = len(self._runs.length)
            return self._runs
        if self._cumulative_cost is None:
            self._cumulative_cost = np.cumsum(self._runs.length + np.uint64(DESCRIPTOR_COST_BYTES))
        spent = int(self._cumulative_cost[start - 1]) if start else 0
        stop = int(np.searchsorted(self._cumulative_cost, np.uint64(spent + budget_bytes), side="right"))
        stop = max(start + 1, min(stop, start + MAX_DESCRIPTORS))
        self._next = stop
        return Runs(*(column[start:stop] for column in self._runs))


class SliceBudget:
    """How large a slice may be: halved where the last took too long, doubled where it was short.

    Measured, because a byte takes 0.1 ns over a fast NIC and 2 ns over TCP in a container.
    """

    MIN_BYTES = 1 << 20
    MAX_BYTES = 64 << 20
    START_BYTES = 4 << 20
    SHORT_S = 0.002
    LONG_S = 0.008

    def __init__(self) -> None:
        self.bytes = self.START_BYTES

    def update(self, elapsed_s: float, was_full: bool) -> None:
        """Adapt to one slice. `elapsed_s`: from before its post until it was terminal."""
        if elapsed_s > self.LONG_S:
            self.bytes = max(self.MIN_BYTES, self.bytes // 2)
        elif elapsed_s < self.SHORT_S and was_full:
            self.bytes = min(self.MAX_BYTES, self.bytes * 2)
