"""Reports the incarnation of each rank's memory to the sessions that publish for its engine.

A publish is bound to the incarnations that its session knew at the call. So a daemon that restarts while a
rank sleeps can find what was published of that rank's old memory. The client keeps the reports over
reconnects. A report is sent when a session joins, and whenever a rank comes or is mapped again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import SendToWorker
from kvxferd.core.ranks.rank import RankRecord
from kvxferd.core.ranks.registry import Registry
from kvxferd.core.ranks.session import Session
from kvxferd.ids import EngineKey, SessionId
from kvxferd.wire.worker import EngineRanks


@dataclass(eq=False, repr=False)
class RankReports:
    """Sends each session the changes of its engine's ranks, once."""

    _context: NodeContext
    _registry: Registry
    _sessions: Mapping[SessionId, Session]

    def report_rank(self, record: RankRecord) -> None:
        """Report a rank that has come, or that was mapped anew. Its own session gets all ranks."""
        for session in self._sessions.values():
            if session.rank is record:
                self.report_all(session)
            elif session.engine == record.spec.key:
                self._send(session, record.spec.key, [record])

    def report_all(self, session: Session) -> None:
        """Report all ranks of its engine to a session. Called before `Registered` is sent."""
        engine = self._registry.get(session.engine) if session.engine is not None else None
        if engine is not None:
            self._send(session, engine.key, engine.ranks.values())

    def _send(self, session: Session, engine: EngineKey, records: Iterable[RankRecord]) -> None:
        """Send a report to a session whose user owns the engine: it may have attached before its ranks."""
        if self._registry.is_owner(session.uid, engine.engine_id):
            ranks = tuple((record.spec.rank, record.incarnation) for record in records)
            self._context.emit(SendToWorker(session.session_id, EngineRanks(ranks=ranks)))
