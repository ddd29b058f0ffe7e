"""A queue that takes from each user in turn: one who puts in much delays the others by one item at most."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
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

    def get(self) -> T:
        """Remove the first item of the user whose turn it is. A KeyError: it is empty."""
        if not self._queues:
            raise KeyError("the queue is empty")
        return self.get_of(next(iter(self._queues)))

    def get_of(self, user: U) -> T:
        """Remove the user's first item, and put the user behind all others. A KeyError: there is none."""
        items = self._queues.pop(user)
        item = items.popleft()
        if items:
            self._queues[user] = items
        return item

    def next_user(self, may_have_turn: Callable[[U], bool]) -> U | None:
        """Return the first user in turn for whom `may_have_turn` holds; None: there is no such user."""
        return next((user for user in self._queues if may_have_turn(user)), None)

    def clear(self) -> None:
        """Drop all items."""
        self._queues.clear()
