"""Where fence words and stamps land."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from kvxferd.mover.transport.base import Span, Transport
from kvxferd.plan import Runs
from kvxferd.wire.limits import FENCE_WORD_BYTES

_SLOT_BYTES = 64  # a cache line each, so that a word that lands touches no other slot's line
_NUM_SLOTS = 1024  # pulls that read their fence word at the same time; more wait


class WordSlots:
    """Registered memory for words that are read; a slot per word under way."""

    def __init__(self, transport: Transport) -> None:
        self._memory = mmap.mmap(-1, _SLOT_BYTES * _NUM_SLOTS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._free = [address + _SLOT_BYTES * i for i in reversed(range(_NUM_SLOTS))]
        self._base = address
        self.span = Span(address, len(self._memory))
        transport.register(self.span)

    def acquire(self) -> int | None:
        """Return the address of a slot that holds zeros, None while all are taken."""
        if not self._free:
            return None
        address = self._free.pop()
        start = address - self._base
        # A word left from an earlier read of the same transfer must never pass for this one's.
        self._memory[start : start + FENCE_WORD_BYTES] = bytes(FENCE_WORD_BYTES)
        return address

    def read(self, address: int) -> bytes:
        """Return what has landed in a slot."""
        start = address - self._base
        return self._memory[start : start + FENCE_WORD_BYTES]

    def release(self, address: int) -> None:
        """The slot's read is terminal."""
        self._free.append(address)


def single_word_run(slot: int, address: int) -> Runs:
    """Return the run that reads a word at an address into a slot."""
    return Runs(*(np.array([number], dtype=np.uint64) for number in (slot, address, FENCE_WORD_BYTES)))
