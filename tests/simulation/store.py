"""One rank's memory, and what must be in it: whoever else writes there shows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvxferd.layout import BlockList, RankLayout
from kvxferd.memory.memfd import SealedMemory
from kvxferd.tooling import content

REUSED = 0xEE  # what an engine writes into blocks that it was given back
FREED = 0xDD  # and into memory that it was given back

Lists = Mapping[str, BlockList]
Bytes = npt.NDArray[np.uint8]


class Store:
    """The regions of one rank while it has them, and their bytes as its engine has written them."""

    def __init__(self, layout: RankLayout) -> None:
        self.layout = layout
        self.memory = SealedMemory.create(layout.regions[0].size_bytes)
        self.bytes: Bytes = np.frombuffer(self.memory.buffer, dtype=np.uint8)
        self._expected = self.bytes.copy()
        self._is_lent = np.zeros(self.bytes.shape, dtype=np.uint8)
        self.is_freed = False

    @property
    def regions(self) -> dict[str, SealedMemory]:
        """What `register` and `resume` take."""
        return {self.layout.regions[0].region: self.memory}

    @property
    def address(self) -> int:
        """Where the memory lies in its engine's process."""
        return self.bytes.ctypes.data

    def write(self, lists: Lists, number: int, start: int, end: int) -> None:
        """Write tokens [start, end) of request `number`, as the engine's kernels do."""
        if self.is_freed or end <= start:
            return
        held = content.RequestBlocks(number, _ids(lists), end)
        for memory in (self.bytes, self._expected):
            content.write(memory, self.layout, held, start)

    def wrong(self, lists: Lists, number: int, num_tokens: int) -> str:
        """Return what is wrong of a delivered request; "" if nothing is."""
        held = content.RequestBlocks(number, _ids(lists), num_tokens, lists["full"].first_token)
        found = content.check(self.bytes, self.layout, held)
        return (
            f"{found.wrong_items} of {found.checked_items}, {found.first_wrong}" if found.wrong_items else ""
        )

    def lend(self, lists: Lists) -> None:
        """Let somebody write these blocks."""
        self._mark(lists, 1)

    def take_back(self, lists: Lists) -> None:
        """Let nobody write these blocks any more, and use them for something else."""
        self._mark(lists, 0)
        if not self.is_freed:
            for memory in (self.bytes, self._expected):
                _fill(memory, self.layout, lists, REUSED)

    def num_changed(self) -> int:
        """Return how many bytes that nobody may write are not as the engine has left them."""
        return int(np.count_nonzero((self.bytes != self._expected) & (self._is_lent == 0)))

    def free(self) -> None:
        """Give all of it back: from now on it is somebody else's."""
        self.is_freed = True
        self.bytes[:] = FREED
        self._expected[:] = FREED
        self._is_lent[:] = 0

    def _mark(self, lists: Lists, value: int) -> None:
        if not self.is_freed:
            _fill(self._is_lent, self.layout, lists, value)


def _ids(lists: Lists) -> dict[str, content.BlockIds]:
    return {name: np.array(listed.ids, dtype=np.int32) for name, listed in lists.items()}


def _fill(memory: Bytes, layout: RankLayout, lists: Lists, value: int) -> None:
    for tensor, group in content._tensors(layout):
        content._view(memory, tensor, group)[content._physical_ids(group, _ids(lists)[group.name])] = value
