"""Transfers that have ended: an id is used once, and late messages about it are harmless."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from kvxferd.core.context import NodeContext
from kvxferd.core.limits.ledger import Charge
from kvxferd.core.limits.table import ENDED_TRANSFERS
from kvxferd.core.source.transfer_table import TransferKey
from kvxferd.errors import Code


class Tombstone(NamedTuple):
    """The record of a transfer that has ended."""

    nonce: str
    why: Code
    uid: int
    ended_at: float


class EndedTransfers:
    """Keeps tombstones for `tombstone_s`.

    Where there is no room, the oldest go, once no message about them is repeated any more.
    """

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._share = context.ledger[ENDED_TRANSFERS]
        self._tombstones: dict[TransferKey, Tombstone] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._tombstones)

    def __iter__(self) -> Iterator[TransferKey]:
        return iter(self._tombstones)

    def get(self, key: TransferKey) -> Tombstone | None:
        """Return how a transfer ended; None: it has not, or that is forgotten."""
        return self._tombstones.get(key)

    def make_room(self, uid: int, what: str) -> None:
        """Have room to remember one more transfer of that user. Raise BusyError where there is none."""
        repeated_s = 2 * self._context.settings.acknowledge_for_s
        while not self._share.has_room(uid) and self._oldest_since() <= self._context.now - repeated_s:
            self._forget_oldest()
        self._share.check(uid, 1, what)

    def add(self, key: TransferKey, nonce: str, uid: int, why: Code) -> None:
        """Remember a transfer that has ended just now."""
        self._tombstones[key] = Tombstone(nonce, why, uid, self._context.now)
        self._share.add(uid, 1)
        if len(self) == 1:
            self._forget_old()

    def charges(self) -> Iterator[Charge]:
        """Yield what the tombstones are counted for."""
        return ((ENDED_TRANSFERS, tombstone.uid, 1) for tombstone in self._tombstones.values())

    def _forget_old(self) -> None:
        # One timer serves all: with one for each, 50,000 made every full garbage collection 50 ms longer.
        kept_s = self._context.settings.tombstone_s
        while self._oldest_since() + kept_s <= self._context.now:
            self._forget_oldest()
        if self._tombstones:
            self._context.timers.set("ended-transfers", self._oldest_since() + kept_s, self._forget_old)

    def _oldest_since(self) -> float:
        oldest = next(iter(self._tombstones.values()), None)
        return math.inf if oldest is None else oldest.ended_at

    def _forget_oldest(self) -> None:
        key = next(iter(self._tombstones))
        self._share.release(self._tombstones.pop(key).uid)
