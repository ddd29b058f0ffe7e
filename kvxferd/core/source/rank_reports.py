"""Reports the incarnation of each rank's memory to the sessions that publish for its engine.

A publish is bound to the incarnations that its session knew at the call. So a daemon that restarts while a
rank sleeps can find what was published of that rank's old memory. The client keeps the reports over
reconnects. A report is sent when a session joins, and whenever a rank comes or is mapped again.
"""

from __future__ import annotations

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import SendToWorker
from kvxferd.core.ranks.registry import Registry
from kvxferd.core.ranks.session import Session
from kvxferd.ids import EngineKey, Incarnation, Rank, SessionId
from kvxferd.wire.worker import EngineRanks


class RankReports:
    """Sends each session the changes of its engine's ranks, once."""

    def __init__(self, context: NodeContext, registry: Registry) -> None:
        self._context = context
        self._registry = registry
        self._sessions: dict[EngineKey, dict[SessionId, Session]] = {}

    def add(self, session: Session, engine: EngineKey) -> None:
        """Report the engine's ranks to the session from now on. Called before `Registered` is sent."""
        self._sessions.setdefault(engine, {})[session.session_id] = session
        known = self._registry.get(engine)
        if known is not None and self._may_receive(session, engine):
            ranks = tuple((rank, record.incarnation) for rank, record in known.ranks.items())
            self._context.emit(SendToWorker(session.session_id, EngineRanks(ranks=ranks)))

    def remove(self, session: SessionId, engine: EngineKey) -> None:
        """Stop the reports to a session. Does nothing where it gets none."""
        sessions = self._sessions.get(engine)
        if sessions is None:
            return
        sessions.pop(session, None)
        if not sessions:
            del self._sessions[engine]

    def report_mapping(self, engine: EngineKey, rank: Rank, incarnation: Incarnation) -> None:
        """Report a rank that has come, or whose memory has another mapping."""
        report = EngineRanks(ranks=((rank, incarnation),))
        for session in self._sessions.get(engine, {}).values():
            if self._may_receive(session, engine):
                self._context.emit(SendToWorker(session.session_id, report))

    def _may_receive(self, session: Session, engine: EngineKey) -> bool:
        """Whether the session's user owns the engine: it may have attached before another user's ranks."""
        return self._registry.is_owner(session.uid, engine.engine_id)
