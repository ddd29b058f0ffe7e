"""The fence pages of publishing sessions. Peers read each through the mover that has registered it."""

from __future__ import annotations

from dataclasses import dataclass

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import CreateFencePage, SendToMover, ShareFencePage
from kvxferd.core.ranks.rank import LocalRank
from kvxferd.core.ranks.registry import Registry
from kvxferd.core.ranks.session import Session
from kvxferd.ids import AgentName, EngineId, EngineKey, MoverId, SessionId
from kvxferd.wire.mover import FenceMapped, UnmapFence


@dataclass(frozen=True, slots=True)
class MappedFencePage:
    """Where a fence page lies in the mover that registered it."""

    agent: AgentName
    address: int
    metadata: bytes


class FencePages:
    """Has one mover at a time serve each session's page."""

    def __init__(self, context: NodeContext, registry: Registry) -> None:
        self._context = context
        self._registry = registry
        # The mover that has mapped each page, or was requested to; where it lies there, once it is mapped.
        self._pages: dict[SessionId, tuple[MoverId, MappedFencePage | None]] = {}

    def create(self, session: Session) -> None:
        """Have the page created that `Registered` carries."""
        self._context.emit(CreateFencePage(session.session_id))

    def is_served(self, session: SessionId) -> bool:
        """Whether a mover has registered the session's page, or was requested to."""
        return session in self._pages

    def assign(self, engine: EngineKey, session: Session) -> None:
        """Have a mover of a rank of the same user register the session's fence page, if there is one.

        Another user's mover, root's included, does not: a resident mover is a process of its user, and a
        client can spoil a page that it made itself.
        """
        known = self._registry.get(engine)
        for record in known.ranks.values() if known is not None else ():
            if (
                isinstance(record, LocalRank)
                and record.uid == session.uid
                and record.is_readable
                and record.mover is not None
            ):
                self._share(session.session_id, record.mover)
                return

    def reassign(self, engine_id: EngineId, sessions: dict[SessionId, Session]) -> None:
        """Have a mover of the engine serve the fence pages of its publishers that no mover serves."""
        for session in sessions.values():
            engine = session.engine
            if engine is None or engine.engine_id != engine_id or self.is_served(session.session_id):
                continue
            self.assign(engine, session)

    def _share(self, session: SessionId, mover: MoverId) -> None:
        """Have the mover register the session's page, unless another one serves it."""
        if not self.is_served(session):
            self._pages[session] = mover, None
            self._context.emit(ShareFencePage(mover, session))

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
