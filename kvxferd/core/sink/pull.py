"""One pull of a local rank: where it is, which moves are legal, and what it needs next.

What it waits for, or reads next, is read off the pull: nothing of it is stored. An ordinary pull is read in
one piece; a progressive one reads what is ready.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import msgspec

from kvxferd.core.ranks.movers import Movers
from kvxferd.core.ranks.rank import LocalRank
from kvxferd.core.sink.held_grant import UNSETTLED, GrantState, HeldGrant
from kvxferd.errors import Code
from kvxferd.ids import MoverId, PullId, Ticket
from kvxferd.layout import BlocksByGroup, num_id_bytes
from kvxferd.plan import PieceRules
from kvxferd.wire.common import TransferRef
from kvxferd.wire.mover import PiecesRead, PullOutcome, PullProgress

# Of a time in a mover's report: longer than any pull. One beyond it counts as none, as a size does.
MAX_REPORTED_S = 1e6
# Of a size: more than any memory. Sums of a million of them are still numbers that can be sent.
MAX_REPORTED = 1 << 43

# What reports of a pull's pieces are summed by, with the most of each.
SUMS: dict[str, float] = {
    **dict.fromkeys(("bytes", "runs", "covered_bytes"), MAX_REPORTED),
    **dict.fromkeys(("queue_s", "expand_s", "post_s", "wire_s", "fence_s", "predicted_s"), MAX_REPORTED_S),
}
NOTHING_READ = PullOutcome(delivered=False)
# A smaller piece is worth no post of its own: what becomes ready is read together, and the end at once.
MIN_PIECE_BYTES = 1 << 20


class PullPhase(StrEnum):
    """Where a pull is. In WAITING no read of it is under way: none was posted, or all are over."""

    WAITING = "waiting"  # handshake, plan and grant
    POSTED = "posted"  # the mover has it
    STOPPING = "stopping"  # cancelled: the mover has been sent AbortPull
    DELIVERED = "delivered"
    FAILED = "failed"
    IN_DOUBT = "in-doubt"  # failed, and the mover may still write
    QUIESCED = "quiesced"  # failed, and proved to be over since


class PullTrigger(StrEnum):
    """What happens to a pull."""

    POST = "post"
    REFUSE = "refuse"  # the grant, the request or the rank's mover does not allow it
    CANCEL = "cancel"
    EXPIRE = "expire"
    DELIVER = "deliver"
    FINISH = "finish"  # not delivered, and every handle is terminal or the mover is dead
    FAULT = "fault"  # not delivered, and not proven ended
    RETRY = "retry"  # not delivered, proven ended, and to be read once more
    CONTINUE = "continue"  # a piece of it is there, and more are to be read


# A pair that is not in the table is a bug. Callers check `can` first where a pair may be missing.
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
    (PullPhase.POSTED, PullTrigger.RETRY): PullPhase.WAITING,  # for a new grant, or the next mover
    (PullPhase.POSTED, PullTrigger.CONTINUE): PullPhase.WAITING,  # for the next piece
    (PullPhase.POSTED, PullTrigger.FAULT): PullPhase.IN_DOUBT,  # DMA may still be landing
    (PullPhase.STOPPING, PullTrigger.EXPIRE): PullPhase.IN_DOUBT,
    (PullPhase.STOPPING, PullTrigger.DELIVER): PullPhase.DELIVERED,  # it was done before it could be stopped
    (PullPhase.STOPPING, PullTrigger.FINISH): PullPhase.FAILED,
    (PullPhase.STOPPING, PullTrigger.FAULT): PullPhase.IN_DOUBT,
    # Too late for a delivery: the engine has received Failed.
    (PullPhase.IN_DOUBT, PullTrigger.DELIVER): PullPhase.QUIESCED,
    (PullPhase.IN_DOUBT, PullTrigger.FINISH): PullPhase.QUIESCED,
}


class Piece(NamedTuple):
    """What one read of a pull reads: nearly always the whole pull."""

    blocks: BlocksByGroup  # this rank's
    end: int  # up to which token
    is_last: bool


@dataclass(slots=True)
class Pull:
    """One local rank's read of one transfer."""

    pull_id: PullId
    rank: LocalRank
    ticket: Ticket
    ref: TransferRef
    blocks: BlocksByGroup
    num_tokens: int
    deadline_s: float
    received_at: float
    held_grant: HeldGrant
    deadline: float = 0.0  # as `deadline_by` was last
    phase: PullPhase = PullPhase.WAITING
    mover: MoverId | None = None  # the mover that has it, from POSTED on
    posted_at: float = 0.0  # when that mover got it
    with_movers_s: float = 0.0  # the pieces that were read were with their movers for so long
    outcome: PullOutcome | None = None
    retried: bool = False
    num_movers_lost: int = 0  # movers that died while they had it
    # The number of the PullsInterrupted whose reply it waits for: only its worker knows if its last mover
    # delivered it. 0: of none.
    interruption: int = 0
    delivered_by_mover: bool = False  # the worker reported that its mover sent Delivered
    phases_s: dict[str, float] = field(default_factory=dict)
    failed_phase: str = ""  # as `PullRecord.failed_phase`
    silent: str = ""  # as `PullRecord.silent`
    late: str = ""  # why it failed at its deadline, which passed while its mover had it
    progressive: bool = False  # it is read in pieces, while its source writes it
    piece: Piece | None = None  # that the mover reads
    tokens_read: int = 0  # of the pieces that are there
    read: PullOutcome = NOTHING_READ  # the sum of these pieces
    whole_at: float | None = None  # when all that it reads was known here to be ready; None: it is not yet
    hidden_bytes: int = 0  # that had been read by then
    fence_word: bytes = b""  # of the transfer that they are of
    report_requested: bool = False  # the mover was requested to report what the pull waits for
    progress: PullProgress | None = None  # its reply

    @property
    def record_phase(self) -> str:
        """Where it is, among PHASES."""
        if self.phase is not PullPhase.WAITING:
            return failed_phase_of(self.outcome) if self.outcome is not None else "wire"
        grant = self.held_grant
        if grant.state is GrantState.REFUSED:
            return grant.refused_in
        return grant.state if grant.state in UNSETTLED else "queue"

    @property
    def is_safe_to_reuse(self) -> bool:
        """Whether nothing can write the pull's blocks any more."""
        return self.phase in (PullPhase.DELIVERED, PullPhase.FAILED, PullPhase.QUIESCED)

    @property
    def local_bytes(self) -> int:
        """The bytes of its blocks on this rank."""
        return self.rank.bytes_of(self.blocks)

    def deadline_by(self, max_hold_s: float) -> float:
        """Return when the pull ends at the latest, in the phase that it is in.

        A progressive one has `deadline_s` for each piece, and for the rest once all is ready. Before that it
        waits for its source, which may not have begun: until `max_hold_s` after its request.
        """
        if not self.progressive:
            return self.received_at + self.deadline_s
        waits_until = self.received_at + max_hold_s
        is_waiting = self.whole_at is None and self.phase is PullPhase.WAITING
        began = self.posted_at if self.whole_at is None else self.whole_at
        return waits_until if is_waiting else min(began, waits_until) + self.deadline_s

    def can(self, trigger: PullTrigger) -> bool:
        """Whether this may happen to the pull now."""
        return (self.phase, trigger) in TRANSITIONS

    def transition(self, trigger: PullTrigger) -> PullPhase:
        """Move to the next phase. A KeyError is a bug of the caller."""
        self.phase = TRANSITIONS[self.phase, trigger]
        return self.phase


def failed_phase_of(outcome: PullOutcome) -> str:
    if outcome.fence_s > 0 or outcome.code is Code.RELEASED:
        return "fence"
    return "wire" if outcome.started else "plan"


class Need(StrEnum):
    """Who has the next word, or what the pull does about it."""

    WORKER = "worker"  # only it knows whether the pull's last mover delivered it
    GRANT = "grant"  # its source's daemon, or this node's planner
    REFUSED = "refused"  # the grant is
    LAPSED = "lapsed"  # the source has ended the grant before anything was posted: it is asked for again
    MOVER = "mover"  # the rank has none that may read
    TOKENS = "tokens"  # its source's ranks compute them


def need_of(pull: Pull, movers: Movers) -> Need | Piece:
    """Return what a waiting pull needs, or the piece that can be read now."""
    grant, rank = pull.held_grant, pull.rank
    if pull.interruption:
        return Need.WORKER
    if grant.state in UNSETTLED:
        return Need.GRANT
    if grant.state is GrantState.REFUSED:
        return Need.REFUSED
    if grant.state is GrantState.LAPSED:
        return Need.LAPSED
    if rank.mover is None or not rank.is_readable or not movers.accepts_pulls(rank.mover):
        return Need.MOVER
    return next_piece(pull) or Need.TOKENS


def next_piece(pull: Pull) -> Piece | None:
    """Return the piece that the pull's grant allows to read now; None: no more is ready than it has."""
    hold = pull.held_grant
    assert hold.reads is not None and hold.granted is not None
    if hold.granted.has_more:
        return None  # of the source's list only the first pages are here
    ready = hold.granted.ready_tokens
    if (not pull.tokens_read and ready < 0) or not num_id_bytes(pull.blocks):
        return Piece(pull.blocks, pull.num_tokens, is_last=True)
    rules = hold.reads.piece_rules
    if _is_whole(pull, ready, rules):
        return Piece(rules.slice(pull.blocks, pull.tokens_read, None), pull.num_tokens, is_last=True)
    if not rules.step_tokens:
        return None
    end = min(ready, pull.num_tokens) // rules.step_tokens * rules.step_tokens
    if end <= pull.tokens_read:
        return None
    return Piece(rules.slice(pull.blocks, pull.tokens_read, end), end, is_last=False)


def _is_whole(pull: Pull, ready: int, rules: PieceRules) -> bool:
    return ready < 0 or (ready >= pull.num_tokens and rules.reads_all)


def record_whole(pull: Pull, now: float) -> None:
    """Record when a progressive pull's grant first allows to read all of it, and what was read before.

    A piece whose read is under way counts as not read.
    """
    hold = pull.held_grant
    if pull.whole_at is not None:
        return
    assert hold.reads is not None and hold.granted is not None
    if _is_whole(pull, hold.granted.ready_tokens, hold.reads.piece_rules):
        pull.whole_at, pull.hidden_bytes = now, pull.read.bytes


def tokens_to_wait_for(pull: Pull, tokens: int) -> int:
    """Return after how many tokens more is worth reading: those that it has, and nearly a piece.

    `tokens`: those that it has, or will have when the piece is there that is read now.
    """
    hold = pull.held_grant
    assert hold.reads is not None
    step = hold.reads.piece_rules.step_tokens
    if not step:
        return pull.num_tokens  # all is read with the last piece
    bytes_per_token = max(1, pull.local_bytes // pull.num_tokens)
    return tokens + max(step, MIN_PIECE_BYTES // bytes_per_token) - 1


def add_piece(total: PullOutcome, piece: PullOutcome) -> PullOutcome:
    """Return the sizes and times of both."""
    if total is NOTHING_READ:
        return piece
    return msgspec.structs.replace(
        total, **{name: getattr(total, name) + getattr(piece, name) for name in SUMS}
    )


def limited(outcome: PullOutcome) -> PullOutcome:
    """Return a report with sizes and times that can be summed: a resident mover's is a worker's word."""
    # NaN is not in between either, and a sum with it stays NaN.
    wrong = {name: type(most)(0) for name, most in SUMS.items() if not 0 <= getattr(outcome, name) <= most}
    return msgspec.structs.replace(outcome, **wrong) if wrong else outcome


def pieces_read(total: PullOutcome) -> PiecesRead | None:
    """Return what a mover needs to report the whole pull; None: it reads the first piece."""
    return PiecesRead(total.bytes, total.runs, total.wire_s) if total is not NOTHING_READ else None
