"""Fence slots: which 16-byte word of the session's fence page belongs to which transfer.

A reader reads the word after the data: an unchanged word proves the data. So a word is fresh and random
before its slot is sent to a daemon, and is overwritten before its slot, or its blocks, are released.

The daemon makes the page and sends it with `Registered`. The movers of a dead daemon may serve its page
until they are dead too, so the page stays mapped, and its words count, until the next page comes.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

from kvxferd.errors import BusyError
from kvxferd.memory import FencePage
from kvxferd.wire.limits import FENCE_WORD_BYTES

RETRY_AFTER_S = 1.0  # the busiest prefill engines release some transfer well within this


class FenceSlots:
    """The free slots of the session's page, longest unused first. Owns every page passed to it."""

    def __init__(
        self,
        num_slots: int,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """`random_bytes` returns so many bytes that nobody can predict."""
        self._random_bytes = random_bytes
        self._current_page: FencePage | None = None  # None: no daemon has accepted the session yet
        self._free = deque(range(num_slots))
        self._words: dict[int, bytes] = {}  # the word that was written, by slot
        self._num_slots = num_slots

    @property
    def _page(self) -> FencePage:
        assert self._current_page is not None, "a session publishes once it is registered"
        return self._current_page

    def switch_page(self, page: FencePage) -> None:
        """Switch to another page; every acquired slot gets a fresh word.

        First the old page's words are overwritten: from then on no read that an earlier daemon
        granted counts as delivered, whichever mover still serves that page.
        """
        old, self._current_page = self._current_page, page
        if old is None:
            return
        for slot in self._words:
            old.overwrite(slot)
        for slot in self._words:
            self.refresh(slot)
        old.close()

    def close(self) -> None:
        """Close the page. No slot may be acquired after that."""
        if self._current_page is not None:
            self._current_page.close()

    def acquire(self, what: str) -> int:
        """Return a slot that holds a fresh word. Raises BusyError when all are in use."""
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
        """Write a fresh word into an acquired slot."""
        self._page.write(slot, self._random_bytes(FENCE_WORD_BYTES))
        self._words[slot] = self._page.read(slot)

    def is_overwritten(self, slot: int) -> bool:
        """Return whether a daemon has overwritten an acquired slot's word: it has released the transfer."""
        return self._page.read(slot) != self._words[slot]

    def release(self, slot: int) -> None:
        """Overwrite the word, then free the slot."""
        self._page.overwrite(slot)
        self._words.pop(slot, None)
        self._free.append(slot)
