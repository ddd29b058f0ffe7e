"""Blocks of a rank's memory that nobody may write: filled with a pattern, and looked at again."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from kvxferd.demo import content
from kvxferd.layout import RankLayout

Bytes = npt.NDArray[np.uint8]


class Blocks:
    """Where each block's bytes lie."""

    def __init__(self, memory: Bytes, layout: RankLayout) -> None:
        self._memory = memory
        mask = content.block_mask(layout, np.array([0], np.int32))
        edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.view(np.int8), [0]))))
        self._runs = [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
        (self._stride,) = {tensor.block_stride for tensor in layout.tensors}

    def fill(self, block: int, value: int) -> None:
        for begin, end in self._runs:
            at = block * self._stride
            self._memory[begin + at : end + at] = value

    def holds(self, block: int, value: int) -> bool:
        at = block * self._stride
        return all(bool((self._memory[b + at : e + at] == value).all()) for b, e in self._runs)


class Yard:
    """Free blocks of a sink, longest free first. What is parked here must keep its pattern."""

    def __init__(self, blocks: Blocks, ids: range) -> None:
        self._blocks = blocks
        self._value = 0
        self._parked: deque[tuple[int, int]] = deque()
        self.num_written = 0  # blocks that somebody wrote although they were safe
        self.park(list(ids))

    def park(self, ids: list[int]) -> None:
        """These were said to be safe: from now on nobody else writes them."""
        self._value = self._value % 251 + 1
        for block in ids:
            self._blocks.fill(block, self._value)
            self._parked.append((block, self._value))

    def take(self, count: int) -> list[int] | None:
        """Return that many blocks, None if there are not so many."""
        if len(self._parked) < count:
            return None
        taken = [self._parked.popleft() for _ in range(count)]
        self._look(taken)
        return [block for block, _ in taken]

    def look(self) -> None:
        """Count what has been written since."""
        self._look(list(self._parked))

    def _look(self, parked: list[tuple[int, int]]) -> None:
        for block, value in parked:
            if not self._blocks.holds(block, value):
                self.num_written += 1
                self._blocks.fill(block, value)

    def spoil(self) -> None:
        """Write a parked block: to show that it is noticed."""
        self._blocks.fill(self._parked[-1][0], 255)
