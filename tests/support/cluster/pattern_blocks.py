"""Blocks of a rank's memory that nobody may write: filled with a pattern, and looked at again."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from kvxferd.layout import RankLayout
from kvxferd.tooling import content

Bytes = npt.NDArray[np.uint8]


class Blocks:
    """Each block's bytes."""

    def __init__(self, memory: Bytes, layout: RankLayout) -> None:
        self._views = list(content.block_views(memory, layout))

    def fill(self, block: int, value: int) -> None:
        for view in self._views:
            view[block] = value

    def holds(self, block: int, value: int) -> bool:
        return all(bool((view[block] == value).all()) for view in self._views)


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
