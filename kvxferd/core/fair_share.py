"""What each user holds of a limit of the node, so that one user cannot make all others `busy`.

The rule, in one sentence: the last eighth of a limit is for users who hold at most a sixteenth of it.
So a node with one user (the normal case) has seven eighths of everything for it, and whoever comes
second finds room, however much the first one asks for.
"""

from __future__ import annotations

from collections.abc import Mapping

RESERVE_DIVISOR = 8  # one part in so many is not for those who hold much
SMALL_DIVISOR = 16  # who holds one part in so many, or less, or just one, holds little


Owner = int | str  # a user, or a peer: its CURVE key, or without one its route


class FairShare:
    """How much of one limit is held, by user."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._held_by_owner: dict[Owner, int] = {}  # a Counter's missing entries cost 1 us each

    @classmethod
    def from_counts(cls, limit: int, held_by: Mapping[int, int]) -> FairShare:
        """Return what users hold of a limit, where that is counted elsewhere."""
        shares = cls(limit)
        for uid, amount in held_by.items():
            shares.add(uid, amount)
        return shares

    def has_room(self, uid: Owner, amount: int = 1) -> bool:
        """Whether that user may have so much more."""
        after = self.held + amount
        if after <= self.limit - self.limit // RESERVE_DIVISOR:
            return True
        return after <= self.limit and self.held_by(uid) + amount <= max(1, self.limit // SMALL_DIVISOR)

    def acquire(self, uid: Owner, amount: int = 1) -> bool:
        """Take so much where there is room; return whether there was."""
        if not self.has_room(uid, amount):
            return False
        self.add(uid, amount)
        return True

    def add(self, uid: Owner, amount: int) -> None:
        """Count what a user holds, whether or not there was room."""
        self.held += amount
        if held := self.held_by(uid) + amount:
            self._held_by_owner[uid] = held
        else:
            self._held_by_owner.pop(uid, None)

    def release(self, uid: Owner, amount: int = 1) -> None:
        """The user holds so much less."""
        self.add(uid, -amount)

    def held_by(self, uid: Owner) -> int:
        """How much the user holds."""
        return self._held_by_owner.get(uid, 0)
