"""One pull of a local rank: where it is, and which steps are legal."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvxferd.core.holds import Hold
from kvxferd.core.registry import LocalRank
from kvxferd.ids import GroupName, MoverId, PullId, Ticket
from kvxferd.layout import PackedBlocks
from kvxferd.wire.common import TransferRef
from kvxferd.wire.mover import PullOutcome


class Phase(StrEnum):
    """Where a pull is. In HOLDING nothing of it is under way: not posted yet, or all of that is over."""

    HOLDING = "holding"  # handshake, plan and grant
    POSTED = "posted"  # the mover has it
    STOPPING = "stopping"  # cancelled: the mover was told to post nothing more
    DELIVERED = "delivered"
    FAILED = "failed"
    IN_DOUBT = "in-doubt"  # failed, and the mover may still write
    QUIET = "quiet"  # failed, and proven ended since


class Signal(StrEnum):
    """What happens to a pull."""

    POST = "post"
    REFUSE = "refuse"  # the hold, the request or the mover's bind said no
    CANCEL = "cancel"
    EXPIRE = "expire"
    DELIVER = "deliver"
    FINISH = "finish"  # not delivered, and every handle is terminal or the mover is dead
    FAULT = "fault"  # not delivered, and not proven ended
    RETRY = "retry"  # not delivered, proven ended, and to be read once more


# A pair that is not here is a bug, never ignored: callers ask `can` first where both may happen.
MOVES: dict[tuple[Phase, Signal], Phase] = {
    (Phase.HOLDING, Signal.POST): Phase.POSTED,
    (Phase.HOLDING, Signal.REFUSE): Phase.FAILED,  # no DMA yet: free now
    (Phase.HOLDING, Signal.CANCEL): Phase.FAILED,
    (Phase.HOLDING, Signal.EXPIRE): Phase.FAILED,
    (Phase.HOLDING, Signal.DELIVER): Phase.DELIVERED,  # nothing to read: a full prefix hit
    (Phase.POSTED, Signal.CANCEL): Phase.STOPPING,
    (Phase.POSTED, Signal.EXPIRE): Phase.IN_DOUBT,
    (Phase.POSTED, Signal.DELIVER): Phase.DELIVERED,
    (Phase.POSTED, Signal.FINISH): Phase.FAILED,
    (Phase.POSTED, Signal.RETRY): Phase.HOLDING,  # a new hold, a new connection
    (Phase.POSTED, Signal.FAULT): Phase.IN_DOUBT,  # DMA may still be landing
    (Phase.STOPPING, Signal.EXPIRE): Phase.IN_DOUBT,
    (Phase.STOPPING, Signal.DELIVER): Phase.DELIVERED,  # it was done before it could be stopped
    (Phase.STOPPING, Signal.FINISH): Phase.FAILED,
    (Phase.STOPPING, Signal.FAULT): Phase.IN_DOUBT,
    (Phase.IN_DOUBT, Signal.DELIVER): Phase.QUIET,  # too late: the engine has been told Failed
    (Phase.IN_DOUBT, Signal.FINISH): Phase.QUIET,
}


@dataclass(slots=True)
class Pull:
    """One local rank's read of one transfer."""

    pull: PullId
    rank: LocalRank
    ticket: Ticket
    ref: TransferRef
    blocks: dict[GroupName, PackedBlocks]
    num_tokens: int
    deadline: float
    received: float
    hold: Hold
    phase: Phase = Phase.HOLDING
    mover: MoverId | None = None  # that has it, from POSTED on
    posted: float | None = None
    outcome: PullOutcome | None = None
    retried: bool = False
    num_movers_lost: int = 0  # movers that died while they had it
    interruption: int = 0  # whether its last mover delivered it, the answer to this one tells; 0: is known
    arrived: bool = False  # the worker has its mover's word that it is delivered
    former: Hold | None = None  # of the first try, until the second has one
    phases_s: dict[str, float] = field(default_factory=dict)

    @property
    def awaits_worker(self) -> bool:
        """Whether only the worker knows if its last mover delivered it."""
        return self.interruption != 0

    @property
    def blocks_are_free(self) -> bool:
        """Whether nothing can write the pull's blocks any more."""
        return self.phase in (Phase.DELIVERED, Phase.FAILED, Phase.QUIET)

    @property
    def local_bytes(self) -> int:
        """The memory of its blocks on this rank."""
        return self.rank.bytes_of(self.blocks)

    def can(self, signal: Signal) -> bool:
        """Whether this may happen to the pull now."""
        return (self.phase, signal) in MOVES

    def move(self, signal: Signal) -> Phase:
        """Take the step; a KeyError is our own bug."""
        self.phase = MOVES[self.phase, signal]
        return self.phase
