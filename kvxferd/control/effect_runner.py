"""Performs what the core has decided: sends, binds, kills, saves, plans and records."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

import structlog

from kvxferd.control.fair_thread import FairThread
from kvxferd.control.mover_assignment import MoverAssignment
from kvxferd.control.ownership_file import OwnershipFile
from kvxferd.control.peer_socket import PeerSocket
from kvxferd.control.worker_socket import WorkerSocket
from kvxferd.core.effects import (
    BindMover,
    ClosePeerConnection,
    CloseWorkerConnection,
    CommitRegionFds,
    CountServed,
    CreateFencePage,
    Effect,
    EmitRecord,
    KillMover,
    MakePlan,
    OverwriteFenceWord,
    ReplyToPeer,
    RequestMover,
    SaveOwnerships,
    SendToMover,
    SendToPeer,
    SendToWorker,
    ShareFencePage,
)
from kvxferd.core.events import Event, PidfdNotSent, PlanMade
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.plan import PlanJob, PlannedReads
from kvxferd.records import PullRecord, ReleaseRecord, ServedRecord
from kvxferd.telemetry.history import History, stamped
from kvxferd.telemetry.logs import log_record
from kvxferd.telemetry.metrics import Metrics
from kvxferd.telemetry.samples import Samples
from kvxferd.telemetry.traces.tracer import Tracer

log = structlog.get_logger()


@dataclass(slots=True)
class Recorders:
    """Whoever keeps or shows what has happened. `tracer`: where spans are exported."""

    history: History
    metrics: Metrics
    samples: Samples
    tracer: Tracer | None = None

    def record(self, effect: EmitRecord) -> None:
        """Give a record to all."""
        record = stamped(effect.record, time.time() - effect.ended_ago_s)
        self.history.add(record)
        self.metrics.record(record)
        self.samples.add(record)
        log_record(record)
        if self.tracer is not None and isinstance(record, PullRecord | ReleaseRecord) and record.traceparent:
            self.tracer.add(record)

    def count_served(self, served: ServedRecord) -> None:
        """Count what a peer has read here."""
        self.metrics.record_served(served)
        self.samples.add_served(served.bytes)


@dataclass(frozen=True, slots=True)
class EffectRunner:
    """Performs effects, each by the part whose work it is. `on_event`: for what comes of them."""

    worker_socket: WorkerSocket
    peer_socket: PeerSocket
    movers: MoverAssignment
    ownership_file: OwnershipFile
    planning: FairThread
    recorders: Recorders
    on_event: Callable[[Event], None]

    def perform(self, effect: Effect) -> None:
        """Perform one effect."""
        match effect:
            case SendToWorker():
                self._send_to_worker(effect)
            case CloseWorkerConnection():
                self.worker_socket.close(effect.session)
            case CommitRegionFds():
                self.worker_socket.commit_region_fds(effect.session)
            case CreateFencePage():
                self.worker_socket.make_fence_page(effect.session)
            case OverwriteFenceWord():
                self.worker_socket.overwrite_fence_word(effect.session, effect.slot)
            case RequestMover():
                self.movers.acquire(effect)
            case KillMover():
                self.movers.kill(effect.mover)
            case SendToMover():
                self.movers.send(effect.mover, effect.message)
            case BindMover():
                self.movers.bind(effect)
            case ShareFencePage():
                self.movers.share_fence_page(effect)
            case SendToPeer():
                self.peer_socket.send(effect.endpoint, effect.message, effect.uid)
            case ReplyToPeer():
                self.peer_socket.reply(effect.route, effect.message)
            case ClosePeerConnection():
                self.peer_socket.disconnect(effect.endpoint)
            case SaveOwnerships():
                self.ownership_file.save_soon()
            case EmitRecord():
                self.recorders.record(effect)
            case CountServed():
                self.recorders.count_served(effect.served)
            case MakePlan():
                self._make_plan(effect.job, effect.uid)
            case _:
                assert_never(effect)

    def _send_to_worker(self, effect: SendToWorker) -> None:
        if effect.with_fence_page:
            self.worker_socket.send_with_fence_page(effect.session, effect.message)
            return
        try:
            fds = self.movers.dup_pidfd(effect.pidfd_of) if effect.pidfd_of is not None else ()
        except OSError as error:
            assert effect.pidfd_of is not None
            log.warning("mover pidfd not sent", session=effect.session, reason=error.strerror)
            self.on_event(PidfdNotSent(effect.session, effect.pidfd_of))
            return
        self.worker_socket.send(effect.session, effect.message, fds)

    def _make_plan(self, job: PlanJob, uid: int) -> None:
        def made(outcome: PlannedReads | KvxferdError | Exception) -> None:
            if not isinstance(outcome, PlannedReads | KvxferdError):
                log.error("plan not made", exc_info=outcome)
                outcome = EngineError(f"cannot plan: {outcome!r}; see this daemon's log", Code.INTERNAL)
            self.on_event(PlanMade(job, outcome))

        self.planning.submit(str(uid), job.make, made)
