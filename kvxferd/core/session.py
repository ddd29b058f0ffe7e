"""Connections on the worker socket, and what each of them has said it is."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvxferd.core.grant_client import HeldGrant
from kvxferd.core.registry import LocalRank
from kvxferd.ids import EngineKey, Rank, SessionId
from kvxferd.wire.block_id_parts import BlockIdAssembly
from kvxferd.wire.common import TransferRef


@dataclass(slots=True)
class Session:
    """One connection. It is a rank, or publishes for an engine, or is nothing yet."""

    session_id: SessionId
    pid: int
    uid: int
    greeted: bool = False
    version: int = 1  # of the worker protocol, once greeted
    has_delivery_socket: bool = False  # its rank's mover says Delivered to it itself
    rank: LocalRank | None = None
    attached: EngineKey | None = None
    awaits_mover: bool = False  # a child was asked for and has not come: there is one at a time
    num_offers: int = 0  # of movers, each with a number of its own
    assembly: BlockIdAssembly = field(default_factory=BlockIdAssembly)
    charged_with_rank: bool = False  # what the assembly holds is counted among users who have a rank
    prepared: dict[TransferRef, HeldGrant] = field(default_factory=dict)
    num_discarded: int = 0  # holds taken ahead and left, whose questions may still wait for an answer
    abandoning: set[TransferRef] = field(default_factory=set)  # told to the source, and not answered

    @property
    def is_admitted(self) -> bool:
        """Whether it is a rank, or publishes for an engine: before, nothing is kept of it."""
        return self.engine is not None

    @property
    def engine(self) -> EngineKey | None:
        """The engine that it may publish for."""
        return self.rank.spec.key if self.rank is not None else self.attached

    @property
    def own_rank(self) -> Rank | None:
        """Its own place in that engine; None for a scheduler."""
        return self.rank.spec.rank if self.rank is not None else None
