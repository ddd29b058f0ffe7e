"""The tables of both expanders of a mover, of all its plans, kept within a limit of bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

# HND against NHD with 80 layers: 10 KiB a plan for covering reads, and 500 KiB to 1 MiB for direct ones.
MAX_TABLE_BYTES = 32 << 20
# Of the limit, what one entry may have: a larger one is rather made again than to leave no room for others.
ENTRY_DIVISOR = 4
# Of Python's objects about the arrays: block lists that begin at many different tokens have many tables of
# few bytes each.
ENTRY_OVERHEAD_BYTES = 512

Table = TypeVar("Table")


class TableCache:
    """Drops the longest unused entries where all together are too large.

    What was dropped stays valid for those that have it, and is made again by the next `get`.
    """

    def __init__(self, max_bytes: int = MAX_TABLE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._entries: dict[Hashable, tuple[Any, int]] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable, make: Callable[[], Table], size_of: Callable[[Table], int]) -> Table:
        """Return the table under a key, made now unless it is kept. `size_of`: its bytes."""
        found = self._entries.pop(key, None)
        if found is None:
            made = make()
            found = made, ENTRY_OVERHEAD_BYTES + size_of(made)
            if found[1] > self._max_bytes // ENTRY_DIVISOR:
                return made
            self.num_bytes += found[1]
        self._entries[key] = found
        while self.num_bytes > self._max_bytes:
            _, num_bytes = self._entries.pop(next(iter(self._entries)))
            self.num_bytes -= num_bytes
        table: Table = found[0]
        return table
