"""Where each publishing session's fence page can be read from: which mover has registered it."""

from __future__ import annotations

from dataclasses import dataclass

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import SendToMover, ShareFencePage
from kvxferd.ids import AgentName, MoverId, SessionId
from kvxferd.wire.mover import FenceMapped, UnmapFence


@dataclass(frozen=True, slots=True)
class MappedFencePage:
    """A fence page inside a mover."""

    mover: MoverId
    agent: AgentName
    address: int
    metadata: bytes


class FencePages:
    """One mover at a time serves a session's page."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._requested: dict[SessionId, MoverId] = {}
        self._mapped: dict[SessionId, MappedFencePage] = {}

    def is_served(self, session: SessionId) -> bool:
        """Whether a mover has, or was asked to have, the session's page."""
        return session in self._requested

    def share(self, session: SessionId, mover: MoverId) -> None:
        """Have a mover register the session's page, unless one serves it."""
        if not self.is_served(session):
            self._requested[session] = mover
            self._context.emit(ShareFencePage(mover, session))

    def page_mapped(self, mover: MoverId, agent: AgentName, message: FenceMapped) -> bool:
        """A mover has the page now. Return whether that is news."""
        if self._requested.get(message.session) != mover or message.session in self._mapped:
            return False
        self._mapped[message.session] = MappedFencePage(mover, agent, message.address, message.metadata)
        return True

    def page_refused(self, mover: MoverId, session: SessionId) -> bool:
        """A mover cannot use the page. Return whether it was the one that was asked."""
        if self._requested.get(session) != mover:
            return False
        del self._requested[session]
        self._mapped.pop(session, None)
        return True

    def get(self, session: SessionId) -> MappedFencePage | None:
        """Where the page can be read; None: not yet, or not any more."""
        return self._mapped.get(session)

    def remove_session(self, session: SessionId) -> None:
        """The session's page is nobody's."""
        mover = self._requested.pop(session, None)
        self._mapped.pop(session, None)
        if mover is not None:
            self._context.emit(SendToMover(mover, UnmapFence(session=session)))

    def remove_mover(self, mover: MoverId) -> list[SessionId]:
        """Return the sessions whose page needs another mover."""
        orphans = [session for session, serving in self._requested.items() if serving == mover]
        for session in orphans:
            del self._requested[session]
            self._mapped.pop(session, None)
        return orphans
