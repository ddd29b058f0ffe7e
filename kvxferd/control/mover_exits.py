"""Counts the movers' ends by their causes, and logs those that nothing has ended."""

from __future__ import annotations

from collections import Counter

import structlog

from kvxferd.control.worker_socket import WorkerSocket
from kvxferd.core.node import Node
from kvxferd.core.ranks.movers import Mover, MoverState
from kvxferd.mover.supervisor.handle import MoverHandle, ResidentHandle
from kvxferd.telemetry.mover_usage import MoverExit

log = structlog.get_logger()


class MoverExits:
    """How many movers ended, since the daemon began."""

    def __init__(self, node: Node, worker_socket: WorkerSocket) -> None:
        self._node = node
        self._worker_socket = worker_socket
        self.counts: Counter[MoverExit] = Counter()

    def record(self, handle: MoverHandle) -> None:
        """Count a mover that is gone, before the core forgets it."""
        mover, is_resident = self._node.movers.get(handle.mover_id), isinstance(handle, ResidentHandle)
        if mover is None and is_resident:
            return  # it was refused
        cause = self._cause_of_exit(mover)
        self.counts[cause] += 1
        if cause is MoverExit.DIED and not is_resident:
            engine = mover.engine.engine_id if mover is not None and mover.engine is not None else ""
            log.warning(
                "mover died",
                limit_by=engine,
                engine=engine,
                agent=handle.agent,
                pid=handle.pid,
                was_ready=bool(handle.library),
            )

    def _cause_of_exit(self, mover: Mover | None) -> MoverExit:
        if mover is None:  # no rank had it yet
            return MoverExit.DIED
        if mover.state is MoverState.DYING:
            return MoverExit.REQUESTED
        if not self._worker_socket.is_worker_alive(mover.session):
            return MoverExit.WORKER_GONE
        return MoverExit.DIED
