"""One pull of a local rank: where it is, and which steps are legal."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvxferd.core.grant_client import HeldGrant
from kvxferd.core.registry import LocalRank
from kvxferd.ids import GroupName, MoverId, PullId, Ticket
from kvxferd.layout import PackedBlocks
from kvxferd.wire.common import TransferRef
from kvxferd.wire.mover import PullOutcome


class PullPhase(StrEnum):
    """Where a pull is. In HOLDING nothing of it is under way: not posted yet, or all of that is over."""

    WAITING = "holding"  # handshake, plan and grant
    POSTED = "posted"  # the mover has it
    STOPPING = "stopping"  # cancelled: the mover was told to post nothing more
    DELIVERED = "delivered"
    FAILED = "failed"
    IN_DOUBT = "in-doubt"  # failed, and the mover may still write
    QUIESCED = "quiet"  # failed, and proven ended since


class PullTrigger(StrEnum):
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
TRANSITIONS: dict[tuple[PullPhase, PullTrigger], PullPhase] = {
    (PullPhase.WAITING, PullTrigger.POST): PullPhase.POSTED,
    (PullPhase.WAITING, PullTrigger.REFUSE): PullPhase.FAILED,  # no DMA yet: free now
    (PullPhase.WAITING, PullTrigger.CANCEL): PullPhase.FAILED,
    (PullPhase.WAITING, PullTrigger.EXPIRE): PullPhase.FAILED,
    (PullPhase.WAITING, PullTrigger.DELIVER): PullPhase.DELIVERED,  # nothing to read: a full prefix hit
    (PullPhase.POSTED, PullTrigger.CANCEL): PullPhase.STOPPING,
    (PullPhase.POSTED, PullTrigger.EXPIRE): PullPhase.IN_DOUBT,
    (PullPhase.POSTED, PullTrigger.DELIVER): PullPhase.DELIVERED,
    (PullPhase.POSTED, PullTrigger.FINISH): PullPhase.FAILED,
    (PullPhase.POSTED, PullTrigger.RETRY): PullPhase.WAITING,  # a new hold, a new connection
    (PullPhase.POSTED, PullTrigger.FAULT): PullPhase.IN_DOUBT,  # DMA may still be landing
    (PullPhase.STOPPING, PullTrigger.EXPIRE): PullPhase.IN_DOUBT,
    (PullPhase.STOPPING, PullTrigger.DELIVER): PullPhase.DELIVERED,  # it was done before it could be stopped
    (PullPhase.STOPPING, PullTrigger.FINISH): PullPhase.FAILED,
    (PullPhase.STOPPING, PullTrigger.FAULT): PullPhase.IN_DOUBT,
    (
        PullPhase.IN_DOUBT,
        PullTrigger.DELIVER,
    ): PullPhase.QUIESCED,  # too late: the engine has been told Failed
    (PullPhase.IN_DOUBT, PullTrigger.FINISH): PullPhase.QUIESCED,
}


@dataclass(slots=True)
class Pull:
    """One local rank's read of one transfer."""

    pull_id: PullId
    rank: LocalRank
    ticket: Ticket
    ref: TransferRef
    blocks: dict[GroupName, PackedBlocks]
    num_tokens: int
    deadline: float
    received_at: float
    held_grant: HeldGrant
    phase: PullPhase = PullPhase.WAITING
    mover: MoverId | None = None  # that has it, from POSTED on
    posted_at: float | None = None
    outcome: PullOutcome | None = None
    retried: bool = False
    num_movers_lost: int = 0  # movers that died while they had it
    interruption: int = 0  # whether its last mover delivered it, the answer to this one tells; 0: is known
    delivered_by_mover: bool = False  # the worker has its mover's word that it is delivered
    former_grant: HeldGrant | None = None  # of the first try, until the second has one
    phases_s: dict[str, float] = field(default_factory=dict)

    @property
    def awaits_worker(self) -> bool:
        """Whether only the worker knows if its last mover delivered it."""
        return self.interruption != 0

    @property
    def is_safe_to_reuse(self) -> bool:
        """Whether nothing can write the pull's blocks any more."""
        return self.phase in (PullPhase.DELIVERED, PullPhase.FAILED, PullPhase.QUIESCED)

    @property
    def local_bytes(self) -> int:
        """The memory of its blocks on this rank."""
        return self.rank.bytes_of(self.blocks)

    def can(self, signal: PullTrigger) -> bool:
        """Whether this may happen to the pull now."""
        return (self.phase, signal) in TRANSITIONS

    def transition(self, signal: PullTrigger) -> PullPhase:
        """Take the step; a KeyError is our own bug."""
        self.phase = TRANSITIONS[self.phase, signal]
        return self.phase
