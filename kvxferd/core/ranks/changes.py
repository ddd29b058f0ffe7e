"""What becomes of a rank, as all parts that it concerns hear of it: `Node` has the one table of them."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from kvxferd.core.ranks.rank import RankRecord


class RankChange(Enum):
    """Reported the moment it happens, before anything else is decided about the rank."""

    REGISTERED = auto()  # a local rank was claimed; its memory is about to be mapped
    MAPPED = auto()  # its memory has another mapping: it was resumed, or is a member's that has joined
    READY = auto()  # a mover has bound its memory, and its home knows it
    ASLEEP = auto()  # nothing may read or write its memory any more
    VOID = auto()  # its worker claims another mapping of memory that it has not suspended
    GONE = auto()


OnRankChange = Callable[[RankChange, RankRecord], None]
