"""How much of a node's limit each user holds, so that one user cannot make all others `busy`.

The rule: the last eighth of a limit is for users who hold at most a sixteenth of it. So the only user
of a node (the normal case) gets seven eighths of everything, and a second user finds room, however much
the first one requests.
"""

from __future__ import annotations

from collections.abc import Mapping

RESERVE_DIVISOR = 8  # one part in eight is reserved for users who hold little
SMALL_DIVISOR = 16  # a user who holds one part in sixteen or less, or a single unit, holds little


Owner = int | str  # a user id, or a peer: its CURVE key, or without keys its route


class FairShare:
    """Counts how much of one limit each user holds."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.by_owner: dict[Owner, int] = {}  # a Counter's missing entries cost 1 us each

    @classmethod
    def from_counts(cls, limit: int, held_by: Mapping[int, int]) -> FairShare:
        """Return the shares of users whose amounts are counted elsewhere."""
        shares = cls(limit)
        for uid, amount in held_by.items():
            shares.add(uid, amount)
        return shares

    def has_room(self, uid: Owner, amount: int = 1) -> bool:
        """Whether the user may hold `amount` more."""
        after = self.held + amount
        if after <= self.limit - self.limit // RESERVE_DIVISOR:
            return True
        return after <= self.limit and self.held_by(uid) + amount <= max(1, self.limit // SMALL_DIVISOR)

    def acquire(self, uid: Owner, amount: int = 1) -> bool:
        """Count `amount` more for the user if there is room. Return whether there was."""
        if not self.has_room(uid, amount):
            return False
        self.add(uid, amount)
        return True

    def add(self, uid: Owner, amount: int) -> None:
        """Count `amount` more for the user, whether or not there is room."""
        self.held += amount
        if held := self.held_by(uid) + amount:
            self.by_owner[uid] = held
        else:
            self.by_owner.pop(uid, None)

    def release(self, uid: Owner, amount: int = 1) -> None:
        """Count `amount` less for the user."""
        self.add(uid, -amount)

    def held_by(self, uid: Owner) -> int:
        """Return how much the user holds."""
        return self.by_owner.get(uid, 0)
