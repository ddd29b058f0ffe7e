"""Performs what the core has decided: sends, binds, kills, saves, plans and records."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

import structlog

from kvxferd.control.fair_thread import FairThread
from kvxferd.control.ownership_file import OwnershipFile
from kvxferd.control.peer_socket import PeerSocket
from kvxferd.control.worker_socket import WorkerSocket
from kvxferd.core.effects import (
    AcceptResidentMover,
    BindMover,
    ClosePeerConnection,
    CloseWorkerConnection,
    CommitRegionFds,
    CountServed,
    Effect,
    EmitRecord,
    ForkMover,
    KillMover,
    MakePlan,
    OverwriteFenceWord,
    ReplyToPeer,
    SaveOwnerships,
    SendToMover,
    SendToPeer,
    SendToWorker,
    ShareFencePage,
    StartForkserver,
)
from kvxferd.core.events import Event, MoverMessage, MoverNotStarted, PidfdNotSent, PlanMade
from kvxferd.errors import Code, EngineError, KvxferdError, count_busy_refusal
from kvxferd.mover.backends import UCX
from kvxferd.mover.supervisor.processes import MoverProcesses
from kvxferd.plan import PlanJob, PlannedReads
from kvxferd.records import PullRecord, ReleaseRecord, ServedRecord
from kvxferd.telemetry.history import History, stamped
from kvxferd.telemetry.logs import log_record
from kvxferd.telemetry.metrics import Metrics
from kvxferd.telemetry.samples import Samples
from kvxferd.telemetry.traces.tracer import Tracer
from kvxferd.wire.common import Refusal
from kvxferd.wire.limits import FENCE_PAGE_BYTES
from kvxferd.wire.mover import FenceRefused, MapFence

log = structlog.get_logger()

MOVER_RETRY_AFTER_S = 1.0  # sessions that end release their descriptors


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
    movers: MoverProcesses
    ownership_file: OwnershipFile
    planning: FairThread
    recorders: Recorders
    on_event: Callable[[Event], None]

    def perform(self, effect: Effect) -> None:
        """Perform one effect."""
        match effect:
            case SendToMover():
                self.movers.send(effect.mover, effect.message)
            case SendToWorker():
                self._send_to_worker(effect)
            case SendToPeer():
                self.peer_socket.send(effect.endpoint, effect.message, effect.uid)
            case ReplyToPeer():
                self.peer_socket.reply(effect.route, effect.message)
            case EmitRecord():
                self.recorders.record(effect)
            case CloseWorkerConnection():
                self.worker_socket.end_session(effect.session, effect.farewell)
            case CommitRegionFds():
                self.worker_socket.commit_region_fds(effect.session)
            case OverwriteFenceWord():
                self.worker_socket.overwrite_fence_word(effect.session, effect.slot)
            case StartForkserver():
                self.movers.start_forkserver()
            case ForkMover():
                self.movers.fork(effect.mover, effect.agent)
            case AcceptResidentMover():
                self._accept_resident(effect)
            case KillMover():
                self.movers.kill(effect.mover)
            case BindMover():
                self._bind_mover(effect)
            case ShareFencePage():
                self._share_fence_page(effect)
            case ClosePeerConnection():
                self.peer_socket.disconnect(effect.endpoint)
            case SaveOwnerships():
                self.ownership_file.save_soon()
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

    def _accept_resident(self, effect: AcceptResidentMover) -> None:
        try:
            brought = self.worker_socket.detach_mover(effect.session)
        except OSError as error:
            log.warning("resident mover not assigned", session=effect.session, reason=error.strerror)
            count_busy_refusal("open_files")
            text = f"cannot take the worker's resident mover: {error.strerror}; try again later"
            refusal = Refusal(Code.BUSY, text, MOVER_RETRY_AFTER_S)
            self.on_event(MoverNotStarted(effect.mover, refusal))
            return
        backend = self.movers.backend.name
        if brought is None:
            refusal = Refusal(Code.MOVER_LOST, "the worker has brought no resident mover")
            self.on_event(MoverNotStarted(effect.mover, refusal))
        elif backend != UCX:
            # Its agent is the worker's, and has UCX: no mover of another backend could read from it. Nor is
            # it known of others that the end of an agent, and not of its process, ends its reads.
            sock, (_, exit_fd) = brought
            sock.close()
            if exit_fd >= 0:
                os.close(exit_fd)
            text = (
                f"cannot use a resident mover: it has {UCX} alone, and mover.backend here is {backend}; "
                f"set mover.backend to {UCX}, or use memory that can be exported"
            )
            self.on_event(MoverNotStarted(effect.mover, Refusal(Code.NIXL_UNAVAILABLE, text)))
        else:
            self.movers.accept(effect.mover, *brought)

    def _bind_mover(self, effect: BindMover) -> None:
        """Send the regions to the mover. If that fails, kill it: its rank is bound again once it is dead."""
        try:
            self.movers.send(effect.mover, effect.message, self.worker_socket.bind_fds(effect.session))
        except OSError as error:
            log.warning("mover not bound", session=effect.session, reason=error.strerror)
            self.movers.kill(effect.mover)

    def _share_fence_page(self, effect: ShareFencePage) -> None:
        try:
            fd = self.worker_socket.fence_page_fd(effect.session)
            if fd < 0:
                return
            message = MapFence(session=effect.session, size_bytes=FENCE_PAGE_BYTES)
            self.movers.send(effect.mover, message, (fd,))
        except OSError as error:
            log.warning("fence page not shared", session=effect.session, reason=error.strerror)
            text = f"cannot hand the page to its mover: {error.strerror}; try again later"
            count_busy_refusal("open_files")
            refused = FenceRefused(session=effect.session, code=Code.BUSY, message=text)
            self.on_event(MoverMessage(effect.mover, refused))

    def _make_plan(self, job: PlanJob, uid: int) -> None:
        def made(outcome: PlannedReads | KvxferdError | Exception) -> None:
            if not isinstance(outcome, PlannedReads | KvxferdError):
                log.error("plan not made", exc_info=outcome)
                outcome = EngineError(f"cannot plan: {outcome!r}; see this daemon's log", Code.INTERNAL)
            self.on_event(PlanMade(job, outcome))

        self.planning.submit(str(uid), job.make, made)
