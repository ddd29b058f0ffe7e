"""What a pull that no mover has waits for, read off the pull: nothing is stored about what comes next."""

from __future__ import annotations

from enum import StrEnum

from kvxferd.core.ranks.movers import Movers
from kvxferd.core.sink.held_grant import UNSETTLED, GrantState
from kvxferd.core.sink.pieces import next_piece
from kvxferd.core.sink.pull import Piece, Pull


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
