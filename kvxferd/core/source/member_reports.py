"""What other daemons report of the ranks that they have joined here: that one has finished writing."""

from __future__ import annotations

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import ReplyToPeer
from kvxferd.core.ranks.home import Home
from kvxferd.core.source.counted_ready import CountedReady
from kvxferd.core.source.publishing import PublishedTransfers
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.ids import EngineKey
from kvxferd.wire.limits import MAX_NAME_CHARS
from kvxferd.wire.peer import RankReady, RequestDone, refusal_of


class MemberReports:
    """Passes members' `RankReady` on to the transfers, each request once."""

    def __init__(self, context: NodeContext, home: Home, published: PublishedTransfers) -> None:
        self._context = context
        self._home = home
        self._published = published
        self._counted = CountedReady(context)

    def rank_ready(self, route: bytes, message: RankReady, key: str) -> None:
        """Record that a member's rank has finished writing. A repeated request counts once.

        Otherwise a late repetition could make the next transfer of the same id ready. For a transfer that has
        ended nothing is kept: its id is not used again for longer than a member repeats a request.
        """
        engine = EngineKey(message.engine_id, message.generation)
        present = self._home.find_member(engine, message.rank)
        if present is None:
            return  # its mover was replaced, or this daemon restarted: sent again once the rank has joined
        if not self._home.accept_from_owner(present, route, message, key):
            return
        has_ended = (engine, message.transfer_id) in self._published.table.tombstones
        if not self._counted.has(present.boot, message.request) and not has_ended:
            peer_id = key or present.boot
            is_part = message.ready_tokens >= 0  # repeated, it changes nothing: it need not be counted
            try:
                _check_names(message)
                if not is_part:
                    self._counted.check_room(peer_id)
            except KvxferdError as error:
                self._context.emit(ReplyToPeer(route, refusal_of(message.request, error)))
                return
            if not is_part:
                self._counted.add(present.boot, message.request, peer_id)
            self._published.rank_ready(
                present, message.incarnation, message.transfer_id, message.ready_tokens
            )
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
