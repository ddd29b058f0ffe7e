"""The fence pages of publishing sessions. Peers read each through the mover that has registered it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import SendToMover, ShareFencePage
from kvxferd.core.ranks.registry import Registry
from kvxferd.core.ranks.session import Session
from kvxferd.ids import AgentName, EngineId, MoverId, SessionId
from kvxferd.wire.mover import FenceMapped, UnmapFence


@dataclass(frozen=True, slots=True)
class MappedFencePage:
    """Where a fence page lies in the mover that registered it."""

    agent: AgentName
    address: int
    metadata: bytes


@dataclass(eq=False, repr=False)
class FencePages:
    """Has one mover at a time serve each session's page."""

    _context: NodeContext
    _registry: Registry
    _sessions: Mapping[SessionId, Session]
    # The mover that has mapped each page, or was requested to; where it lies there, once it is mapped.
    _pages: dict[SessionId, tuple[MoverId, MappedFencePage | None]] = field(default_factory=dict)

    def assign(self, session: Session) -> None:
        """Have a mover of a rank of the same user register the session's fence page, unless one serves it.

        Another user's mover, root's included, does not: a resident mover is a process of its user, and a
        client can spoil a page that it made itself.
        """
        engine = self._registry.get(session.engine) if session.engine is not None else None
        if engine is None or session.session_id in self._pages:
            return
        for rank in engine.local_ranks():
            if rank.uid == session.uid and rank.is_readable:
                assert rank.mover is not None  # it serves readers
                self._pages[session.session_id] = rank.mover, None
                self._context.emit(ShareFencePage(rank.mover, session.session_id))
                return

    def reassign(self, engine_id: EngineId) -> None:
        """Have a mover of the engine serve the fence pages of its publishers that no mover serves."""
        for session in self._sessions.values():
            if session.engine is not None and session.engine.engine_id == engine_id:
                self.assign(session)

    def page_mapped(self, mover: MoverId, agent: AgentName, message: FenceMapped) -> bool:
        """Record that the mover has mapped the page. Return whether anything changed."""
        if self._pages.get(message.session) != (mover, None):
            return False
        self._pages[message.session] = mover, MappedFencePage(agent, message.address, message.metadata)
        return True

    def page_refused(self, mover: MoverId, session: SessionId) -> bool:
        """Record that the mover cannot use the page. Return whether the page was requested of it."""
        if session not in self._pages or self._pages[session][0] != mover:
            return False
        del self._pages[session]
        return True

    def get(self, session: SessionId) -> MappedFencePage | None:
        """Return where the page can be read; None: no mover has mapped it."""
        return self._pages[session][1] if session in self._pages else None

    def remove_session(self, session: SessionId) -> None:
        """Have the mover that serves the session's page unmap it."""
        if (page := self._pages.pop(session, None)) is not None:
            self._context.emit(SendToMover(page[0], UnmapFence(session=session)))

    def remove_mover(self, mover: MoverId) -> None:
        """Forget the mover. `reassign` finds another one for the pages that it served."""
        for session in [session for session, page in self._pages.items() if page[0] == mover]:
            del self._pages[session]
