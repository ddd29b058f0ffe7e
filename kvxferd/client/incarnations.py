"""Which mapping of its memory each rank of the engine has, as far as the session knows.

Kept over reconnects: a publish is bound to what was known when it was called, and a daemon that comes
later compares it with the ranks that it has. So memory that was mapped anew while no daemon was there is
never read as what was published before.
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
        """This session is that rank, and its memory has that mapping. No daemon knows better."""
        self._own_rank = rank
        self._set(((rank, incarnation),))

    def update(self, ranks: RankIncarnations) -> None:
        """A daemon has reported ranks."""
        self._set(tuple(entry for entry in ranks if entry[0] != self._own_rank))

    @property
    def own(self) -> Incarnation:
        """Of this rank's present mapping; empty for a scheduler."""
        return self._known[self._own_rank] if self._own_rank is not None else Incarnation("")

    def _set(self, ranks: RankIncarnations) -> None:
        self._known.update(ranks)
        self.all = tuple(self._known.items())
