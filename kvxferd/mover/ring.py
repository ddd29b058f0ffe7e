"""A mover's own buffer: slots that chunks pass through, and how runs become chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvxferd.mover.slices import cut
from kvxferd.plan import Runs

Uint64s: TypeAlias = npt.NDArray[np.uint64]


class Ring:
    """Equal slots side by side. A slot in doubt is never handed out again."""

    def __init__(self, address: int, slot_bytes: int, num_slots: int) -> None:
        self.slot_bytes = slot_bytes
        self._free = [address + slot_bytes * number for number in reversed(range(num_slots))]
        self._taken: set[int] = set()

    def take(self) -> int | None:
        """Return the address of a free slot, None while there is none."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._taken.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """Nothing reads or writes the slot any more."""
        self._taken.remove(slot)
        self._free.append(slot)

    def lose(self, slot: int) -> None:
        """Something may write the slot for ever."""
        self._taken.remove(slot)

    @property
    def num_free(self) -> int:
        """Slots that can be taken."""
        return len(self._free)

    @property
    def is_spent(self) -> bool:
        """Every slot is lost."""
        return not self._free and not self._taken


def chunks(runs: Runs, slot_bytes: int, max_runs: int) -> Iterator[Runs]:
    """Yield the same bytes in the same order, each time as many runs as a slot holds."""
    runs = cut(runs, slot_bytes)
    ends = np.cumsum(runs.length)
    start, total = 0, len(ends)
    while start < total:
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, np.uint64(before + slot_bytes), side="right"))
        stop = min(stop, start + max_runs)
        yield Runs(*(column[start:stop] for column in runs))
        start = stop


def packed_at(address: int, length: Uint64s) -> Uint64s:
    """Return where stretches of these lengths lie that follow one another from the address on."""
    return np.uint64(address) + np.cumsum(length) - length
