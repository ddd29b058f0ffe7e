"""The fence page: one word for each published transfer, shared by the client and its daemon."""

from __future__ import annotations

import os

from kvxferd.memory.inspect import check_memfd
from kvxferd.memory.mapping import Mapping, map_memfd
from kvxferd.memory.memfd import SealedMemory
from kvxferd.wire.limits import FENCE_PAGE_BYTES, FENCE_SLOTS, FENCE_WORD_BYTES


class FencePage:
    """Words of 16 bytes that readers fetch after the data: unchanged proves that the blocks were held.

    Whoever lets go of a transfer's blocks calls `overwrite` first.
    """

    def __init__(self, mapping: Mapping, memory: SealedMemory | None = None) -> None:
        self._mapping = mapping
        self._memory = memory
        self._words = mapping.view()

    @classmethod
    def create(cls) -> FencePage:
        """Make a page to share (the client). `fd` is what goes to the daemon."""
        memory = SealedMemory.create(FENCE_PAGE_BYTES, "kvxferd-fence")
        try:
            return cls(map_memfd(memory.fd, FENCE_PAGE_BYTES), memory)
        except BaseException:
            memory.close()
            raise

    @classmethod
    def map(cls, fd: int) -> FencePage:
        """Map a page that somebody else made (the daemon). Raises EngineError as `check_memfd` does."""
        check_memfd(fd, FENCE_PAGE_BYTES)
        return cls(map_memfd(fd, FENCE_PAGE_BYTES))

    @property
    def fd(self) -> int:
        """The descriptor to share, -1 on a page that was mapped from one."""
        return self._memory.fd if self._memory is not None else -1

    def write(self, slot: int, word: bytes) -> None:
        """Put a transfer's word in its place. Raises ValueError for a wrong slot or length."""
        start = self._start(slot)
        if len(word) != FENCE_WORD_BYTES:
            raise ValueError(f"cannot write a fence word of {len(word)} bytes: it has {FENCE_WORD_BYTES}")
        self._words[start : start + FENCE_WORD_BYTES] = word

    def read(self, slot: int) -> bytes:
        """Return the word that lies there."""
        start = self._start(slot)
        return bytes(self._words[start : start + FENCE_WORD_BYTES])

    def overwrite(self, slot: int) -> None:
        """From the return of this call on, no read of the transfer counts as delivered."""
        self.write(slot, os.urandom(FENCE_WORD_BYTES))

    def close(self) -> None:
        """Unmap. Idempotent; no other method may be called afterwards."""
        self._words.release()
        self._mapping.unmap()
        if self._memory is not None:
            self._memory.close()

    @staticmethod
    def _start(slot: int) -> int:
        if not 0 <= slot < FENCE_SLOTS:
            raise ValueError(f"cannot use fence slot {slot}: there are {FENCE_SLOTS}")
        return slot * FENCE_WORD_BYTES
