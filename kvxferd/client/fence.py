"""Fence slots: which 16-byte word of the session's fence page belongs to which transfer.

A reader reads the word after the data: unchanged proves the data. So a word is fresh and random
before anybody hears of its slot, and is overwritten before its slot, or its blocks, are let go.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Protocol

from kvxferd.errors import BusyError
from kvxferd.wire.limits import FENCE_SLOTS, FENCE_WORD_BYTES

RETRY_AFTER_S = 1.0  # the busiest prefill engines release some transfer well within this


class Page(Protocol):
    """What a fence page does; `kvxferd.memory.FencePage` is the real one."""

    def write(self, slot: int, word: bytes) -> None:
        """Put `word` in `slot`."""

    def overwrite(self, slot: int) -> None:
        """Make the word in `slot` another one."""


class FenceSlots:
    """The free slots of one page, longest unused first."""

    def __init__(self, page: Page, num_slots: int = FENCE_SLOTS) -> None:
        self._page = page
        self._free = deque(range(num_slots))
        self._num_slots = num_slots

    def take(self, what: str) -> int:
        """Return a slot that holds a fresh word. Raises BusyError when all are taken."""
        if not self._free:
            raise BusyError(
                f"cannot {what}: {self._num_slots} transfers of this session are not released yet; "
                "wait for a Released event",
                RETRY_AFTER_S,
            )
        slot = self._free.popleft()
        self.refresh(slot)
        return slot

    def refresh(self, slot: int) -> None:
        """Put a fresh word in a taken slot."""
        self._page.write(slot, os.urandom(FENCE_WORD_BYTES))

    def give_back(self, slot: int) -> None:
        """Overwrite the word, then let the slot go."""
        self._page.overwrite(slot)
        self._free.append(slot)
