"""Probes that peers request: a region for the peer to read, then one read of the peer's region.

A peer that asks in a loop costs this node little: most requests are refused before anything is made, and a
probe that the peer does not continue ends within seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import ReplyToPeer, ReportProbe
from kvxferd.core.probe_client import READ_FOR_S
from kvxferd.core.probe_record import SERVED, ProbeDirection, ProbeRecord, direction_of
from kvxferd.core.probe_slot import ProbeSlot
from kvxferd.errors import BusyError, Code, EngineError, KvxferdError
from kvxferd.ids import ProbeId
from kvxferd.wire.common import Refusal
from kvxferd.wire.mover import FromMover, ProbeFailed, ProbeFinished, ProbeServed, ReadProbe, ServeProbe
from kvxferd.wire.peer import (
    Done,
    EndProbe,
    ProbeReport,
    ProbeStarted,
    ReadProbeBack,
    ReplyMessage,
    StartProbe,
    refusal_of,
)
from kvxferd.wire.probe import ProbeRead, ProbeRegion

# After one probe ended: until the same peer may request another, and until any peer may. A probe that its
# peer does not continue lasts 11 s. Without keys all peers are one: they cannot be told apart.
SAME_PEER_INTERVAL_S, ANY_PEER_INTERVAL_S = 30.0, 5.0
START_S = 6.0  # to find a mover and fill its region
# The peer finds a mover, reads, and fills its region: two of its steps. Its mover may have to be replaced.
SERVE_S = 11.0
READ_S = 6.0  # of the peer's region
END_S = 3.0  # until the peer ends the probe, while its report may be requested again


@dataclass(slots=True)
class _Run:
    probe: ProbeId
    key: str
    size_bytes: int
    started_at: float
    route: bytes
    request: int  # to reply to
    region: ProbeRegion | None = None  # this node's
    reads: ProbeRegion | None = None  # the peer's, once it is to be read
    report: ProbeRead | None = None


class ProbeServer:
    """Answers peers' probes, one at a time."""

    def __init__(self, context: NodeContext, slot: ProbeSlot) -> None:
        self._context = context
        self._slot = slot
        self._run: _Run | None = None
        self._ended_at: dict[str, float] = {}  # by key, of the last `SAME_PEER_INTERVAL_S`; the oldest first

    # --- requests

    def start(self, route: bytes, message: StartProbe, key: str) -> None:
        """Provide a region, or refuse."""
        run = self._find(message.probe, key)
        if run is not None:
            run.route = route
            if run.reads is None:
                run.request = message.request
            if run.region is not None:
                self._reply(route, ProbeStarted(request=message.request, region=run.region))
            return
        try:
            self._check_start(key)
            self._slot.acquire(message.probe, self)
        except KvxferdError as error:
            self._reply(route, refusal_of(message.request, error))
            return
        self._run = _Run(message.probe, key, message.size_bytes, self._context.now, route, message.request)
        self._set_deadline(START_S, "a mover for it")
        self._slot.request_mover()

    def read_back(self, route: bytes, message: ReadProbeBack, key: str) -> None:
        """Read the peer's region, or refuse."""
        run = self._find(message.probe, key)
        try:
            if run is None or run.region is None:
                raise EngineError(
                    "cannot read back: there is no such probe here; it has ended, or this daemon is new",
                    Code.NOT_FOUND,
                )
            message.region.check(run.size_bytes)
        except KvxferdError as error:
            self._reply(route, refusal_of(message.request, error))
            return
        run.route, run.request = route, message.request
        if run.report is not None:
            self._reply(route, ProbeReport(request=message.request, read=run.report))
        elif run.reads is None:
            run.reads = message.region
            self._set_deadline(READ_S, "a read of the requesting node's memory")
            self._slot.send(ReadProbe(region=message.region, for_s=READ_FOR_S))

    def end(self, route: bytes, message: EndProbe, key: str) -> None:
        """End the probe."""
        if self._find(message.probe, key) is not None:
            self._end()
        self._reply(route, Done(request=message.request))

    @property
    def is_running(self) -> bool:
        """Whether a probe of this side runs."""
        return self._run is not None

    def cancel(self, code: Code, why: str) -> None:
        """End the probe that runs, if there is one."""
        if self._run is not None:
            self._fail(EngineError(f"cannot go on with the probe: {why}", code))

    @property
    def key(self) -> str | None:
        """Return the key of the peer whose probe runs; None: none runs."""
        return self._run.key if self._run is not None else None

    def _find(self, probe: str, key: str) -> _Run | None:
        run = self._run
        return run if run is not None and (run.probe, run.key) == (probe, key) else None

    def _check_start(self, key: str) -> None:
        if self._context.draining:
            raise EngineError("cannot be probed: this daemon drains, and begins nothing new", Code.DRAINING)
        now = self._context.now
        while self._ended_at:
            oldest, ended_at = next(iter(self._ended_at.items()))
            if now - ended_at < SAME_PEER_INTERVAL_S:
                break
            del self._ended_at[oldest]
        last = next(reversed(self._ended_at.values()), None)
        wait_s = 0.0 if last is None else last + ANY_PEER_INTERVAL_S - now
        if key in self._ended_at:
            wait_s = max(wait_s, self._ended_at[key] + SAME_PEER_INTERVAL_S - now)
        if wait_s > 0:
            raise BusyError(
                f"cannot be probed again so soon; try again in {math.ceil(wait_s)} s", max(wait_s, 0.1)
            )

    # --- the mover

    def mover_ready(self) -> None:
        """Have it fill its region."""
        assert self._run is not None
        self._slot.send(ServeProbe(size_bytes=self._run.size_bytes))

    def mover_lost(self, refusal: Refusal) -> None:
        """End the probe: the region is gone."""
        self._fail(KvxferdError(refusal.message, refusal.code, retry_after_s=refusal.retry_after_s))

    def handle_mover_message(self, message: FromMover) -> None:
        """Handle what the mover reports. A message that is not awaited is void."""
        run = self._run
        assert run is not None
        match message:
            case ProbeServed() if run.region is None:
                run.region = message.region
                self._set_deadline(SERVE_S, "the requesting node")
                self._reply(run.route, ProbeStarted(request=run.request, region=message.region))
            case ProbeFinished() if run.reads is not None and run.report is None:
                run.report = self._slot.with_transports(message.read)
                self._slot.set_deadline(END_S, self._end)
                self._reply(run.route, ProbeReport(request=run.request, read=run.report))
            case ProbeFailed():
                self._fail(KvxferdError(message.message, message.code))

    # --- the end

    def _set_deadline(self, delay_s: float, what: str) -> None:
        error = KvxferdError(f"cannot go on with the probe: {what} did not come in time", Code.DEADLINE)
        self._slot.set_deadline(delay_s, lambda: self._fail(error))

    def _fail(self, error: KvxferdError) -> None:
        """Refuse the request that waits, and end the probe."""
        run = self._run
        assert run is not None
        if run.region is None or (run.reads is not None and run.report is None):
            self._reply(run.route, refusal_of(run.request, error))
        self._end(error)

    def _end(self, error: KvxferdError | None = None) -> None:
        run, self._run = self._run, None
        assert run is not None
        self._slot.release()
        self._ended_at.pop(run.key, None)
        self._ended_at[run.key] = self._context.now
        read: ProbeDirection | None = direction_of(run.report) if run.report is not None else None
        record = ProbeRecord(
            probe=run.probe,
            role=SERVED,
            peer=run.key,
            size_bytes=run.size_bytes,
            elapsed_s=round(self._context.now - run.started_at, 6),
            code=None if error is None else error.code,
            message="" if error is None else error.message,
            read=read,
        )
        self._context.emit(ReportProbe(record))

    def _reply(self, route: bytes, message: ReplyMessage) -> None:
        self._context.emit(ReplyToPeer(route, message))
