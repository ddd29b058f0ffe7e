"""Where each publishing session's fence page can be read from: which mover has registered it."""

from __future__ import annotations

from dataclasses import dataclass

from kvxferd.core.effects import ShareFence, ToMover
from kvxferd.core.moment import Moment
from kvxferd.ids import AgentName, MoverId, SessionId
from kvxferd.wire.mover import FenceMapped, UnmapFence


@dataclass(frozen=True, slots=True)
class PagePlace:
    """A fence page inside a mover."""

    mover: MoverId
    agent: AgentName
    address: int
    metadata: bytes


class Fences:
    """One mover at a time serves a session's page."""

    def __init__(self, moment: Moment) -> None:
        self._moment = moment
        self._asked: dict[SessionId, MoverId] = {}
        self._places: dict[SessionId, PagePlace] = {}

    def is_served(self, session: SessionId) -> bool:
        """Whether a mover has, or was asked to have, the session's page."""
        return session in self._asked

    def share(self, session: SessionId, mover: MoverId) -> None:
        """Have a mover register the session's page, unless one serves it."""
        if not self.is_served(session):
            self._asked[session] = mover
            self._moment.do(ShareFence(mover, session))

    def mapped(self, mover: MoverId, agent: AgentName, said: FenceMapped) -> bool:
        """A mover has the page now. Return whether that is news."""
        if self._asked.get(said.session) != mover or said.session in self._places:
            return False
        self._places[said.session] = PagePlace(mover, agent, said.address, said.metadata)
        return True

    def refused(self, mover: MoverId, session: SessionId) -> bool:
        """A mover cannot use the page. Return whether it was the one that was asked."""
        if self._asked.get(session) != mover:
            return False
        del self._asked[session]
        self._places.pop(session, None)
        return True

    def place(self, session: SessionId) -> PagePlace | None:
        """Where the page can be read; None: not yet, or not any more."""
        return self._places.get(session)

    def session_gone(self, session: SessionId) -> None:
        """The session's page is nobody's."""
        mover = self._asked.pop(session, None)
        self._places.pop(session, None)
        if mover is not None:
            self._moment.do(ToMover(mover, UnmapFence(session=session)))

    def mover_gone(self, mover: MoverId) -> list[SessionId]:
        """Return the sessions whose page needs another mover."""
        orphans = [session for session, serving in self._asked.items() if serving == mover]
        for session in orphans:
            del self._asked[session]
            self._places.pop(session, None)
        return orphans
