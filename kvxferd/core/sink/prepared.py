"""Grants that are requested before their pulls come, because a worker has announced them."""

from __future__ import annotations

from collections.abc import Iterator

from kvxferd.core.context import NodeContext
from kvxferd.core.limits.block_id_memory import ENTRY_BYTES
from kvxferd.core.limits.ledger import Charge
from kvxferd.core.limits.table import BLOCK_ID_BYTES
from kvxferd.core.ranks.rank import LocalRank
from kvxferd.core.ranks.session import Session
from kvxferd.core.sink.grants import GrantClient
from kvxferd.core.sink.held_grant import GrantState, HeldGrant
from kvxferd.ids import SessionId
from kvxferd.wire.common import TransferRef

MAX_PREPARED = 1024  # grants requested ahead, per session; each is renewed for minutes


class PreparedGrants:
    """The grants of each session, until its pull takes them, or nobody has wanted one for too long."""

    def __init__(self, context: NodeContext, grant_client: GrantClient) -> None:
        self._context = context
        self._grant_client = grant_client
        self._block_ids = context.ledger[BLOCK_ID_BYTES]
        self._of_session: dict[SessionId, dict[TransferRef, HeldGrant]] = {}

    def __iter__(self) -> Iterator[HeldGrant]:
        for prepared in self._of_session.values():
            yield from prepared.values()

    def charges(self) -> Iterator[Charge]:
        """Yield what the grants are counted for."""
        for hold in self:
            yield BLOCK_ID_BYTES, hold.rank.uid, ENTRY_BYTES + hold.charged_bytes

    def prepare(self, session: Session, rank: LocalRank, ref: TransferRef) -> None:
        """Request a grant, unless it is requested already or there is no room: the pull requests its own."""
        prepared = self._of_session.setdefault(session.session_id, {})
        if ref in prepared or len(prepared) >= MAX_PREPARED:
            return
        if not self._block_ids.acquire(session.uid, ENTRY_BYTES):
            return
        prepared[ref] = self._grant_client.acquire(rank, ref, self._context.settings.handshake_wait_s)
        self._context.after(
            ("prepared", session.session_id, ref),
            self._context.settings.max_hold_s,
            lambda: self.discard(session, ref),
        )

    def pop(self, session: Session, ref: TransferRef) -> HeldGrant | None:
        """Return the session's grant, unless it was refused or has ended: a new one may succeed."""
        hold = self._remove(session, ref)
        # One of another rank is of a registration that failed, maybe of another layout.
        if hold is not None and (
            hold.rank is not session.rank or hold.state in (GrantState.REFUSED, GrantState.LAPSED)
        ):
            self._grant_client.release(hold)
            return None
        return hold

    def discard(self, session: Session, ref: TransferRef) -> None:
        """End a grant that no pull wants. Does nothing where there is none."""
        if (hold := self._remove(session, ref)) is not None:
            self._grant_client.release(hold)

    def session_closed(self, session: Session) -> None:
        """End all grants of the session."""
        for ref in list(self._of_session.get(session.session_id, ())):
            self.discard(session, ref)
        self._of_session.pop(session.session_id, None)

    def _remove(self, session: Session, ref: TransferRef) -> HeldGrant | None:
        hold = self._of_session.get(session.session_id, {}).pop(ref, None)
        if hold is not None:
            self._block_ids.release(session.uid, ENTRY_BYTES)
            self._context.timers.cancel(("prepared", session.session_id, ref))
        return hold
