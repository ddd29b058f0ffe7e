"""The incarnation of each rank's memory, as the daemon last reported it.

It is kept over reconnects: a publish is bound to the incarnations at the time of the call, and a later
daemon compares them with the ranks that it has. So memory that was mapped again while no daemon was there
is never read as the blocks that were published before.
"""

from __future__ import annotations

from kvxferd.ids import Incarnation, Rank
from kvxferd.wire.common import RankIncarnations


class KnownIncarnations:
    """The newest incarnation of each rank. A rank that has left keeps its last: nothing else is safe."""

    def __init__(self) -> None:
        self._known: dict[Rank, Incarnation] = {}
        self._own_rank: Rank | None = None
        self.all: RankIncarnations = ()  # one object for all publishes between two changes

    def set_own(self, rank: Rank, incarnation: Incarnation) -> None:
        """Set this session's own rank and incarnation, which no daemon's report changes."""
        self._own_rank = rank
        self._set(((rank, incarnation),))

    def update(self, ranks: RankIncarnations) -> None:
        """Record the ranks that a daemon has reported."""
        self._set(tuple(entry for entry in ranks if entry[0] != self._own_rank))

    @property
    def own(self) -> Incarnation:
        """The incarnation of this rank's present mapping; empty for a scheduler."""
        return self._known[self._own_rank] if self._own_rank is not None else Incarnation("")

    def _set(self, ranks: RankIncarnations) -> None:
        self._known.update(ranks)
        self.all = tuple(self._known.items())
