"""Hands out what a source is asked to pack, a chunk or less at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvxferd.mover.process.covering import ChunkFill, PlacedStretches
from kvxferd.plan.gathering import Gathered
from kvxferd.wire.staging import MAX_GATHER_PATTERNS, GatherPattern


class Gathering(NamedTuple):
    """What one request asks for, and what becomes of the packed bytes."""

    parts: tuple[Gathered, ...]
    fill: ChunkFill  # without an address to read from

    @property
    def patterns(self) -> tuple[GatherPattern, ...]:
        """The patterns, as the request names them."""
        return tuple(
            GatherPattern(stretches.remote.astype("<u8").tobytes(), *pattern)
            for pattern, stretches in self.parts
        )


class GatherSlicer:
    """What one remote rank is asked to pack, handed out in order."""

    def __init__(self, gathered: Sequence[Gathered]) -> None:
        self._left = [one for one in gathered if len(one.stretches.remote)]
        self.num_runs = sum(one.pattern.num_runs * len(one.stretches.remote) for one in self._left)
        self.num_bytes = sum(one.stretches.num_bytes for one in self._left)
        self._number = 0  # of what is handed out now
        self._next = 0  # of its stretches
        for one in self._left:
            if one.stretches.local.min() < 0:
                raise ValueError("a stretch's origin lies before its region")

    @property
    def cost_bytes(self) -> int:
        """How long it takes, as the number of bytes that take as long: the source copies all, too."""
        return 2 * self.num_bytes

    @property
    def is_empty(self) -> bool:
        """Whether everything was handed out."""
        return self._number >= len(self._left)

    def next_gathering(self, max_bytes: int, max_starts: int) -> Gathering:
        """Return what one chunk of so many bytes holds, and one request names: at least one stretch."""
        parts: list[Gathered] = []
        placed: list[PlacedStretches] = []
        used = num_starts = 0
        while not self.is_empty and len(parts) < MAX_GATHER_PATTERNS:
            one = self._left[self._number]
            total = len(one.stretches.remote)
            room = min((max_bytes - used) // one.pattern.size_bytes, max_starts - num_starts)
            if room <= 0 and parts:
                break
            taken = one.slice(self._next, self._next + max(1, room))
            count = len(taken.stretches.remote)
            parts.append(taken)
            placed.append(PlacedStretches(taken.stretches, used))
            used += count * one.pattern.size_bytes
            num_starts += count
            self._next += count
            if self._next < total:
                break
            self._number, self._next = self._number + 1, 0
        zero = np.zeros(1, dtype=np.int64)
        fill = ChunkFill(zero, zero, np.array([used], dtype=np.int64), tuple(placed), used)
        return Gathering(tuple(parts), fill)

    def rest(self) -> list[Gathered]:
        """Hand out all that is left, to be read in another way."""
        rest = []
        while not self.is_empty:
            one = self._left[self._number]
            rest.append(one.slice(self._next, len(one.stretches.remote)))
            self._number, self._next = self._number + 1, 0
        return rest
