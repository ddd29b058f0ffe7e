"""What other daemons report of the ranks that they have joined here: that one has finished writing."""

from __future__ import annotations

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import ReplyToPeer
from kvxferd.core.ranks.home import Home
from kvxferd.core.source.announced import Report
from kvxferd.core.source.publishing import PublishedTransfers
from kvxferd.core.source.transfer_table import ALL_TOKENS
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.ids import EngineKey
from kvxferd.wire.limits import MAX_NAME_CHARS
from kvxferd.wire.peer import RankReady, RequestDone, refusal_of


class MemberReports:
    """Passes members' `RankReady` on to the transfers."""

    def __init__(self, context: NodeContext, home: Home, published: PublishedTransfers) -> None:
        self._context = context
        self._home = home
        self._published = published

    def rank_ready(self, route: bytes, message: RankReady, key: str) -> None:
        """Record what a member's rank has written. A repeated request changes nothing.

        A transfer that has ended has its tombstone for longer than a member repeats a request, and
        `Announcements` has the requests about one that was never published.
        """
        engine = EngineKey(message.engine_id, message.generation)
        present = self._home.find_member(engine, message.rank)
        if present is None:
            return  # its mover was replaced, or this daemon restarted: sent again once the rank has joined
        if not self._home.accept_from_owner(present, route, message, key):
            return
        try:
            _check_names(message)
        except KvxferdError as error:
            self._context.emit(ReplyToPeer(route, refusal_of(message.request, error)))
            return
        num_tokens = ALL_TOKENS if message.ready_tokens < 0 else message.ready_tokens
        report = Report(message.incarnation, num_tokens, (present.boot, message.request))
        if self._published.rank_ready(present, message.transfer_id, report):  # else it is sent again
            self._context.emit(ReplyToPeer(route, RequestDone(request=message.request)))


def _check_names(message: RankReady) -> None:
    """Raise EngineError for names that are longer than any transfer's or incarnation's, and for no number."""
    if message.ready_tokens < -1:
        text = f"cannot take rank {message.rank} as ready with {message.ready_tokens} tokens"
        raise EngineError(text, Code.BLOCKS_INVALID)
    if max(len(message.transfer_id), len(message.incarnation)) > MAX_NAME_CHARS:
        raise EngineError(
            f"cannot take rank {message.rank} as ready: its transfer or incarnation has more than "
            f"{MAX_NAME_CHARS} characters",
            Code.TRANSFER_UNKNOWN,
        )
