"""The last entries of a log or a history, numbered, and some of the older ones."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Entry(NamedTuple, Generic[T]):
    """One of them."""

    number: int  # from 1, one more for each
    item: T
    size: int  # bytes
    is_kept: bool  # when it is no longer among the last


class _Ring(Generic[T]):
    """The last entries, bounded in number and bytes."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self.entries: deque[Entry[T]] = deque()

    def add(self, entry: Entry[T]) -> list[Entry[T]]:
        """Append an entry; return those that give way."""
        gone = []
        self.entries.append(entry)
        self._num_bytes += entry.size
        while len(self.entries) > self._max_entries or self._num_bytes > self._max_bytes:
            oldest = self.entries.popleft()
            self._num_bytes -= oldest.size
            gone.append(oldest)
        return gone


class RecentEntries(Generic[T]):
    """The last entries. Once full, each new one drops the oldest; those that are kept stay longer."""

    def __init__(self, max_entries: int, max_bytes: int, max_kept: int, max_kept_bytes: int) -> None:
        self._recent = _Ring[T](max_entries, max_bytes)
        self._kept = _Ring[T](max_kept, max_kept_bytes)  # older than those
        self.last = 0  # the number of the last one

    def add(self, item: T, size: int, is_kept: bool) -> int:
        """Append an item; return the number of the last entry that is no longer among the last, or 0."""
        self.last += 1
        gone = self._recent.add(Entry(self.last, item, size, is_kept))
        for entry in gone:
            if entry.is_kept:
                self._kept.add(entry)
        return gone[-1].number if gone else 0

    def all(self) -> Iterator[Entry[T]]:
        """Yield the entries, oldest first."""
        return heapq.merge(self._kept.entries, self._recent.entries)

    def get(self, number: int) -> T:
        """Return one of the last entries."""
        recent = self._recent.entries
        return recent[number - recent[0].number].item
