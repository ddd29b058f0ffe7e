"""The memory for covering reads that this node's movers may hold, under one limit. Counted in chunks.

A mover that wants more than is left makes the others give some back: each may hold as much as any other,
or as much as it wants. First come would leave 48 of 64 movers without a chunk while the first 16 read. Each
mover has one grant at a time that it has not acknowledged: it counts until the mover reports that it holds
no more. A mover without a grant reads directly, so that nobody waits for memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import SendToMover
from kvxferd.ids import MoverId
from kvxferd.wire.limits import CHUNK_BYTES, MAX_CHUNKS_PER_MOVER
from kvxferd.wire.mover import ChunkMemoryGranted, ChunkMemoryRequest


@dataclass(slots=True)
class _Share:
    wanted: int = 0
    granted: int = 0
    held: int = 0  # at most, as the mover has reported it
    lost: int = 0  # of these

    @property
    def counted(self) -> int:
        return max(self.granted, self.held)


class ChunkMemory:
    """Grants movers what they want, and takes some back for others."""

    def __init__(self, context: NodeContext, limit_bytes: int) -> None:
        self._context = context
        self._limit = limit_bytes // CHUNK_BYTES
        self._shares: dict[MoverId, _Share] = {}

    @property
    def num_bytes(self) -> int:
        """The bytes that are granted, or still held."""
        return CHUNK_BYTES * sum(share.counted for share in self._shares.values())

    def has_lost(self, mover: MoverId) -> bool:
        """Whether the mover has memory that nothing can use before it is dead."""
        share = self._shares.get(mover)
        return share is not None and share.lost > 0

    def handle(self, mover: MoverId, message: ChunkMemoryRequest) -> None:
        """Note what a mover wants and holds. Send it and the others what they may hold."""
        share = self._shares.setdefault(mover, _Share())
        wanted = min(max(message.num_wanted, 0), MAX_CHUNKS_PER_MOVER)
        is_asking, share.wanted = wanted > share.wanted, wanted
        share.held = min(max(message.num_held, 0), share.counted)
        share.lost = min(message.num_lost, share.held)
        self._balance(mover if is_asking else None)
        if not (share.wanted or share.counted):
            del self._shares[mover]

    def forget(self, mover: MoverId) -> None:
        """Take back what a mover had that is dead."""
        if self._shares.pop(mover, None) is not None:
            self._balance()

    def _balance(self, asking: MoverId | None = None) -> None:
        """Grant what each may hold now. One that asks has a reply, also where nothing has changed."""
        targets = fair_shares({mover: share.wanted for mover, share in self._shares.items()}, self._limit)
        left = self._limit - sum(share.counted for share in self._shares.values())
        for mover, share in self._shares.items():
            granted = share.granted
            if share.held == share.granted:  # else it has not acknowledged that
                granted = min(targets[mover], share.granted + left)
            if granted != share.granted or mover == asking:
                left -= max(0, granted - share.granted)
                share.granted = granted
                self._context.emit(SendToMover(mover, ChunkMemoryGranted(num_chunks=granted)))

    def check_integrity(self) -> None:
        """Raise AssertionError where movers may hold more than the limit."""
        counted = sum(share.counted for share in self._shares.values())
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
