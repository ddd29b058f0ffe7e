"""A mover's own buffer: slots that chunks pass through, and how runs become chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvxferd.mover.process.slices import split_long_runs
from kvxferd.plan import Runs

Uint64s: TypeAlias = npt.NDArray[np.uint64]


class SlotPool:
    """Equal slots side by side. A slot in doubt is never handed out again."""

    def __init__(self, address: int, slot_bytes: int, num_slots: int) -> None:
        self.slot_bytes = slot_bytes
        self._free = [address + slot_bytes * number for number in reversed(range(num_slots))]
        self._acquired: set[int] = set()

    def acquire(self) -> int | None:
        """Return the address of a free slot, None while there is none."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._acquired.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Nothing reads or writes the slot any more."""
        self._acquired.remove(slot)
        self._free.append(slot)

    def quarantine(self, slot: int) -> None:
        """Something may write the slot for ever."""
        self._acquired.remove(slot)

    @property
    def num_free(self) -> int:
        """Slots that can be taken."""
        return len(self._free)

    @property
    def is_exhausted(self) -> bool:
        """Every slot is lost."""
        return not self._free and not self._acquired


def split_into_chunks(runs: Runs, slot_bytes: int, max_runs: int) -> Iterator[Runs]:
    """Yield the same bytes in the same order, each time as many runs as a slot holds."""
    runs = split_long_runs(runs, slot_bytes)
    ends = np.cumsum(runs.length)
    start, total = 0, len(ends)
    while start < total:
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, np.uint64(before + slot_bytes), side="right"))
        stop = min(stop, start + max_runs)
        yield Runs(*(column[start:stop] for column in runs))
        start = stop


def packed_addresses(address: int, length: Uint64s) -> Uint64s:
    """Return where stretches of these lengths lie that follow one another from the address on."""
    return np.uint64(address) + np.cumsum(length) - length
