"""One rank's memory, and what must be in it: whoever else writes there shows."""

from __future__ import annotations

from contextlib import ExitStack
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvxferd.client import Region
from kvxferd.ids import RegionId
from kvxferd.layout import RankLayout
from kvxferd.memory import SealedMemory
from kvxferd.memory.device import ResidentMemory
from tests.simulation.contents import Contents, Lists
from tests.simulation.shapes import RankShape

REUSED = 0xEE  # what an engine writes into blocks that it was given back
FREED = 0xDD  # and into memory that it was given back

Bytes = npt.NDArray[np.uint8]


@lru_cache(maxsize=4096)
def contents_of(layout: RankLayout) -> Contents:
    """Return what a layout's blocks hold."""
    return Contents(layout)


class Store:
    """The memories of one rank while it has them, and their bytes as its engine has written them."""

    def __init__(self, shape: RankShape, is_resident: bool) -> None:
        self._shape, self._is_resident = shape, is_resident
        self._contents = contents_of(shape.layout)
        self.memories: list[SealedMemory] = []
        with ExitStack() as undoing:
            for size in shape.memory_bytes:
                self.memories.append(undoing.enter_context(SealedMemory.create(size)))
            undoing.pop_all()
        self._bytes = [np.frombuffer(memory.buffer, dtype=np.uint8) for memory in self.memories]
        self._expected = [real.copy() for real in self._bytes]
        self._is_lent = [np.zeros_like(real) for real in self._bytes]
        self._views = shape.views([memory.buffer for memory in self.memories])
        self._expected_views = shape.views(self._expected)
        self._lent_views = shape.views(self._is_lent)
        self.is_freed = False

    @property
    def regions(self) -> list[Region] | dict[RegionId, ResidentMemory]:
        """What `register` and `resume` take."""
        if not self._is_resident:
            return self._shape.regions(self.memories)
        return {name: ResidentMemory(view.ctypes.data, view.size) for name, view in self._views.items()}

    def write(self, lists: Lists, number: int, start: int, end: int | None) -> None:
        """Write tokens [start, end) of request `number`, as the engine's kernels do; None: to its end."""
        if not self.is_freed:
            for views in (self._views, self._expected_views):
                self._contents.write(views, lists, number, start, end)

    def wrong(self, lists: Lists, number: int, num_tokens: int) -> str:
        """Return what is wrong of a delivered request; "" if nothing is."""
        found = self._contents.check(self._views, lists, number, num_tokens)
        return f"{found.count} bytes, first {found.first}" if found.count else ""

    def lend(self, lists: Lists) -> None:
        """Let somebody write these blocks."""
        self._fill(self._lent_views, lists, 1)

    def take_back(self, lists: Lists) -> None:
        """Let nobody write these blocks any more, and use them for something else."""
        self._fill(self._lent_views, lists, 0)
        self._fill(self._views, lists, REUSED)
        self._fill(self._expected_views, lists, REUSED)

    def num_changed(self) -> int:
        """Return how many bytes that nobody may write are not as the engine has left them."""
        found = 0
        for real, expected, is_lent in zip(self._bytes, self._expected, self._is_lent, strict=True):
            if real.tobytes() != expected.tobytes():
                found += int(np.count_nonzero((real != expected) & (is_lent == 0)))
        return found

    def free(self) -> None:
        """Give all of it back: from now on it is somebody else's."""
        self.is_freed = True
        for arrays, value in ((self._bytes, FREED), (self._expected, FREED), (self._is_lent, 0)):
            for array in arrays:
                array[:] = value

    def _fill(self, views: dict[RegionId, Bytes], lists: Lists, value: int) -> None:
        if not self.is_freed:
            for name, listed in lists.items():
                if any(group.name == name for group in self._shape.layout.groups):
                    self._contents.overwrite(views, name, list(listed.ids), value)
