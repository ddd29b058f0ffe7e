"""One connection on the worker socket, and what it has registered as."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvxferd.core.ranks.rank import LocalRank
from kvxferd.ids import EngineKey, Rank, SessionId
from kvxferd.wire.block_id_parts import BlockIdAssembly
from kvxferd.wire.common import TransferRef
from kvxferd.wire.worker import Refused, Suspended


@dataclass(slots=True)
class Session:
    """One connection. It is a rank, or publishes for an engine, or has registered as neither yet."""

    session_id: SessionId
    pid: int
    uid: int
    greeted: bool = False
    rank: LocalRank | None = None
    attached: EngineKey | None = None
    awaits_mover: bool = False  # a child mover was requested and has not come: one at a time
    num_offers: int = 0  # of movers so far; the last offer has this number
    replies_once_unmapped: list[Refused | Suspended] = field(default_factory=list)
    assembly: BlockIdAssembly = field(default_factory=BlockIdAssembly)
    charged_with_rank: bool = False  # the assembly's bytes count in the share of users who have a rank
    abandoning: set[TransferRef] = field(default_factory=set)  # sent to the source, without a reply yet

    @property
    def is_admitted(self) -> bool:
        """Whether it is a rank, or publishes for an engine: before that, none of its data is kept."""
        return self.engine is not None

    @property
    def engine(self) -> EngineKey | None:
        """The engine that it may publish for."""
        return self.rank.spec.key if self.rank is not None else self.attached

    @property
    def own_rank(self) -> Rank | None:
        """Its rank in that engine; None for a scheduler."""
        return self.rank.spec.rank if self.rank is not None else None
