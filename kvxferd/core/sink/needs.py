"""What a pull that no mover has waits for, or reads next: read off the pull, nothing of it is stored.

An ordinary pull is read in one piece; a progressive one reads what is ready.
"""

from __future__ import annotations

from enum import StrEnum

from kvxferd.core.ranks.movers import Movers
from kvxferd.core.sink.held_grant import UNSETTLED, GrantState
from kvxferd.core.sink.pull import Piece, Pull
from kvxferd.plan import PieceRules

# A smaller piece is worth no post of its own: what becomes ready is read together, and the end at once.
MIN_PIECE_BYTES = 1 << 20


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
    if pull.awaits_worker:
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
    ready = hold.granted.ready_tokens
    reads_nothing = not any(packed.ids for packed in pull.blocks.values())
    if reads_nothing or (not pull.tokens_read and ready < 0):
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
    if not pull.progressive or pull.whole_at is not None:
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
