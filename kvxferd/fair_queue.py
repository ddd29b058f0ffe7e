"""A queue that takes from each user in turn: one who puts in much delays the others by one item at most."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

U = TypeVar("U", bound=Hashable)
T = TypeVar("T")


class FairQueue(Generic[U, T]):
    """Items by user. It keeps nothing of users without items."""

    def __init__(self) -> None:
        self._queues: OrderedDict[U, deque[T]] = OrderedDict()  # the next in turn first

    def __bool__(self) -> bool:
        return bool(self._queues)

    def put(self, user: U, item: T) -> None:
        """Add an item behind the user's others."""
        self._queues.setdefault(user, deque()).append(item)

    def get(self) -> tuple[U, T]:
        """Remove the first item of the user whose turn it is, and return both. A KeyError: it is empty."""
        user, items = self._queues.popitem(last=False)
        item = items.popleft()
        if items:
            self._queues[user] = items  # behind all others
        return user, item

    def clear(self) -> None:
        """Drop all items."""
        self._queues.clear()
