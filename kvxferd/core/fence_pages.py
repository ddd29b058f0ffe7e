"""Which mover has registered each publishing session's fence page, so that peers can read it."""

from __future__ import annotations

from dataclasses import dataclass

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import SendToMover, ShareFencePage
from kvxferd.ids import AgentName, MoverId, SessionId
from kvxferd.wire.mover import FenceMapped, UnmapFence


@dataclass(frozen=True, slots=True)
class MappedFencePage:
    """Where a fence page lies in the mover that registered it."""

    mover: MoverId
    agent: AgentName
    address: int
    metadata: bytes


class FencePages:
    """Has one mover at a time serve each session's page."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._requested: dict[SessionId, MoverId] = {}
        self._mapped: dict[SessionId, MappedFencePage] = {}

    def is_served(self, session: SessionId) -> bool:
        """Whether a mover has registered the session's page, or was requested to."""
        return session in self._requested

    def share(self, session: SessionId, mover: MoverId) -> None:
        """Have the mover register the session's page, unless another one serves it."""
        if not self.is_served(session):
            self._requested[session] = mover
            self._context.emit(ShareFencePage(mover, session))

    def page_mapped(self, mover: MoverId, agent: AgentName, message: FenceMapped) -> bool:
        """Record that the mover has mapped the page. Return whether anything changed."""
        if self._requested.get(message.session) != mover or message.session in self._mapped:
            return False
        self._mapped[message.session] = MappedFencePage(mover, agent, message.address, message.metadata)
        return True

    def page_refused(self, mover: MoverId, session: SessionId) -> bool:
        """Record that the mover cannot use the page. Return whether the page was requested of it."""
        if self._requested.get(session) != mover:
            return False
        del self._requested[session]
        self._mapped.pop(session, None)
        return True

    def get(self, session: SessionId) -> MappedFencePage | None:
        """Return where the page can be read; None: no mover has mapped it."""
        return self._mapped.get(session)

    def remove_session(self, session: SessionId) -> None:
        """Have the mover that serves the session's page unmap it."""
        mover = self._requested.pop(session, None)
        self._mapped.pop(session, None)
        if mover is not None:
            self._context.emit(SendToMover(mover, UnmapFence(session=session)))

    def remove_mover(self, mover: MoverId) -> list[SessionId]:
        """Forget the mover. Return the sessions whose page needs another one."""
        orphans = [session for session, serving in self._requested.items() if serving == mover]
        for session in orphans:
            del self._requested[session]
            self._mapped.pop(session, None)
        return orphans
