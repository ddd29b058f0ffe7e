"""The memory for covering reads that this node's movers may hold, under one limit.

A mover that wants more than is left makes the others give some back: each may hold as much as any other,
or as much as it wants. A grant is numbered, and counts until its mover, which may still act by it, reports
that it has a later one; what the mover holds counts until it reports that it holds less, or is dead. A mover
without a grant reads directly, so that nobody waits for memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import SendToMover
from kvxferd.ids import MoverId
from kvxferd.wire.limits import CHUNK_BYTES
from kvxferd.wire.mover import ChunkMemoryGranted, ChunkMemoryRequest

# One mover's: a read under way, a scatter under way, a read behind each, and as many again of another pull.
MAX_BYTES_PER_MOVER = 8 * CHUNK_BYTES


class _Grant(NamedTuple):
    number: int
    num_chunks: int


@dataclass(slots=True)
class _Holding:
    wanted: int = 0  # chunks
    held: int = 0
    lost: int = 0
    # By which its mover may act: each is smaller than the one before it, and the last is the present one.
    grants: list[_Grant] = field(default_factory=list)

    @property
    def granted(self) -> int:
        return self.grants[-1].num_chunks if self.grants else 0

    @property
    def counted(self) -> int:
        return max(self.grants[0].num_chunks, self.held) if self.grants else self.held

    def grant(self, number: int, num_chunks: int) -> None:
        while self.grants and self.grants[-1].num_chunks <= num_chunks:
            self.grants.pop()  # the later one allows as much
        self.grants.append(_Grant(number, num_chunks))

    def has_seen(self, number: int) -> None:
        """Note that the mover acts by that grant, or a later one."""
        while len(self.grants) > 1 and self.grants[0].number < number:
            del self.grants[0]


class ChunkMemory:
    """Counts in chunks."""

    def __init__(self, context: NodeContext, limit_bytes: int) -> None:
        self._context = context
        self._limit = limit_bytes // CHUNK_BYTES
        self._holdings: dict[MoverId, _Holding] = {}
        self._last_number = 0  # of all movers' grants

    @property
    def num_bytes(self) -> int:
        """The bytes that are granted, or still held."""
        return CHUNK_BYTES * sum(one.counted for one in self._holdings.values())

    def lost_bytes(self, mover: MoverId) -> int:
        """Return how much of a mover's memory nothing can use before it is dead."""
        holding = self._holdings.get(mover)
        return CHUNK_BYTES * holding.lost if holding is not None else 0

    def handle(self, mover: MoverId, message: ChunkMemoryRequest) -> None:
        """Note what a mover wants and holds, and send it and the others what they may hold."""
        holding = self._holdings.setdefault(mover, _Holding())
        holding.has_seen(message.number)
        holding.wanted = _num_chunks(message.wanted_bytes)
        holding.held = _num_chunks(message.held_bytes)
        holding.lost = min(_num_chunks(message.lost_bytes), holding.held)
        self._balance(replying_to=mover)
        if not (holding.wanted or holding.counted):
            del self._holdings[mover]

    def refuse(self, mover: MoverId) -> None:
        """Grant a mover nothing, whatever it wants."""
        self._context.emit(SendToMover(mover, ChunkMemoryGranted(size_bytes=0)))

    def forget(self, mover: MoverId) -> None:
        """Take back what a mover had that is dead."""
        if self._holdings.pop(mover, None) is not None:
            self._balance()

    def _balance(self, replying_to: MoverId | None = None) -> None:
        targets = fair_shares({mover: one.wanted for mover, one in self._holdings.items()}, self._limit)
        granted = {mover: one.granted for mover, one in self._holdings.items()}
        for mover, target in targets.items():
            granted[mover] = min(granted[mover], target)
        left = self._limit - sum(one.counted for one in self._holdings.values())
        for mover, target in targets.items():
            holding = self._holdings[mover]
            # What it holds is counted already.
            possible = min(target, holding.counted + max(0, left))
            if possible > granted[mover]:
                left -= max(0, possible - holding.counted)
                granted[mover] = possible
        for mover, holding in self._holdings.items():
            if mover == replying_to or granted[mover] != holding.granted:
                self._grant(mover, holding, granted[mover])

    def _grant(self, mover: MoverId, holding: _Holding, num_chunks: int) -> None:
        self._last_number += 1
        holding.grant(self._last_number, num_chunks)
        granted = ChunkMemoryGranted(size_bytes=CHUNK_BYTES * num_chunks, number=self._last_number)
        self._context.emit(SendToMover(mover, granted))

    def check_integrity(self) -> None:
        """Raise AssertionError where movers may hold more than the limit."""
        counted = sum(one.counted for one in self._holdings.values())
        assert counted <= self._limit, f"movers may hold {counted} chunks: the limit is {self._limit}"


def fair_shares(wanted: Mapping[MoverId, int], limit: int) -> dict[MoverId, int]:
    """Return how many of `limit` each gets: what it wants, or as many as anyone that gets less than it wants.

    Where there are more of them than chunks, the first ones get one each.
    """
    shares, left = {}, limit
    # The latest first, so that what does not divide goes to those that were here before.
    latest_first = list(wanted.items())[::-1]
    by_want = sorted(latest_first, key=lambda one: one[1])
    for number, (mover, num) in enumerate(by_want):
        shares[mover] = min(num, left // (len(by_want) - number))
        left -= shares[mover]
    return {mover: shares[mover] for mover in wanted}


def _num_chunks(size_bytes: int) -> int:
    return min(max(size_bytes, 0), MAX_BYTES_PER_MOVER) // CHUNK_BYTES
