"""The probe that this node's operator requests: this node reads from the peer, then the peer from this node.

Each direction ends with a result or an error of its own. Whatever the peer does, each step has a deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from kvxferd.core.context import NodeContext
from kvxferd.core.effects import ReportProbe
from kvxferd.core.events import ProbeRequested
from kvxferd.core.peers import MakeMessage, Peers, as_refusal
from kvxferd.core.probe_record import REQUESTED, ProbeDirection, ProbeRecord, direction_of
from kvxferd.core.probe_slot import ProbeSlot
from kvxferd.errors import Code, EngineError, KvxferdError, PeerError, ProtocolError
from kvxferd.ids import Endpoint
from kvxferd.wire.common import Refusal
from kvxferd.wire.endpoint import address_of
from kvxferd.wire.limits import MAX_PROBE_BYTES, MIN_PROBE_BYTES
from kvxferd.wire.mover import FromMover, ProbeFailed, ProbeFinished, ProbeServed, ReadProbe, ServeProbe
from kvxferd.wire.peer import (
    EndProbe,
    ProbeReport,
    ProbeStarted,
    ReadProbeBack,
    ReplyMessage,
    StartProbe,
)
from kvxferd.wire.probe import ProbeRegion

READ_FOR_S = 0.5  # after which a reader ends with the slice that it has
# A mover is forked (30 ms; 0.7 s with the forkserver), connects, reads and verifies.
STEP_S = 5.0
START_TIMEOUT_S = 8.0  # for the peer to find a mover and fill its region
READ_BACK_TIMEOUT_S = 8.0
END_TIMEOUT_S = 2.0  # the peer ends the probe by itself, too
GREET_AND_START_S = 19.0  # where the peer's greeting takes long, START_TIMEOUT_S has not begun
READ_BACK_LIMIT_S = 2 * READ_BACK_TIMEOUT_S  # behind the request's own
# Greeting and start, both movers, both reads: the operator's request is answered within it.
MAX_PROBE_S = GREET_AND_START_S + 2 * STEP_S + READ_BACK_LIMIT_S


class _Step(Enum):
    STARTING = auto()  # the peer prepares its region
    READING = auto()  # this node's mover reads it
    SERVING = auto()  # this node's mover prepares a region
    READ_BACK = auto()  # the peer reads it


@dataclass(slots=True)
class _Run:
    requested: ProbeRequested
    started_at: float
    step: _Step = _Step.STARTING
    region: ProbeRegion | None = None  # the peer's
    read: ProbeDirection | None = None


class ProbeClient:
    """Runs the operator's probes, one at a time."""

    def __init__(self, context: NodeContext, slot: ProbeSlot, peers: Peers) -> None:
        self._context = context
        self._slot = slot
        self._peers = peers
        self._run: _Run | None = None

    def request(self, event: ProbeRequested) -> None:
        """Begin a probe, or report why not."""
        run = _Run(event, self._context.now)
        try:
            self._check(event)
            self._slot.acquire(event.probe, self)
        except KvxferdError as error:
            self._report(run, error=error)
            return
        self._run = run
        self._slot.set_deadline(
            GREET_AND_START_S, lambda: self._end(error=_deadline_error("the peer's answer"))
        )
        self._request_peer(
            event.endpoint,
            lambda number: StartProbe(request=number, probe=event.probe, size_bytes=event.size_bytes),
            START_TIMEOUT_S,
            lambda reply: self._started(run, reply),
        )

    @property
    def is_running(self) -> bool:
        """Whether a probe of this side runs."""
        return self._run is not None

    def cancel(self, code: Code, why: str) -> None:
        """End the probe that runs, if there is one."""
        if self._run is not None:
            self._end(error=PeerError(f"cannot go on with the probe: {why}", code))

    @property
    def endpoint(self) -> Endpoint | None:
        """Return which peer is probed; None: none."""
        return self._run.requested.endpoint if self._run is not None else None

    def _check(self, event: ProbeRequested) -> None:
        if self._context.draining:
            raise EngineError("cannot probe: this daemon drains, and begins nothing new", Code.DRAINING)
        if event.endpoint in (self._context.endpoint, address_of(self._context.endpoint)):
            raise EngineError(
                f"cannot probe {event.endpoint}: it is this daemon; `kvxferd doctor` without --peer reads "
                "within this node",
                Code.BAD_REQUEST,
            )
        if not MIN_PROBE_BYTES <= event.size_bytes <= MAX_PROBE_BYTES:
            raise EngineError(
                f"cannot probe with {event.size_bytes} bytes: give {MIN_PROBE_BYTES} to {MAX_PROBE_BYTES}",
                Code.BAD_REQUEST,
            )

    def _request_peer(
        self,
        endpoint: Endpoint,
        make_message: MakeMessage,
        timeout_s: float,
        on_reply: Callable[[ReplyMessage], None],
    ) -> None:
        self._peers.request(endpoint, make_message, timeout_s, on_reply, uid=self._context.settings.own_uid)

    # --- the first direction

    def _started(self, run: _Run, reply: ReplyMessage) -> None:
        if run is not self._run or run.step is not _Step.STARTING:
            return
        if not isinstance(reply, ProbeStarted):
            refused = as_refusal(reply)
            self._end(error=PeerError(refused.message, refused.code, retry_after_s=refused.retry_after_s))
            return
        run.region = reply.region
        try:
            reply.region.check(run.requested.size_bytes)
        except ProtocolError as error:
            self._end(error=error)
            return
        run.step = _Step.READING
        self._slot.set_deadline(STEP_S, lambda: self._read_failed(_deadline_error("a read from the peer")))
        self._slot.request_mover()

    def mover_ready(self) -> None:
        """Read or serve, whichever step it is."""
        run = self._run
        assert run is not None
        if run.step is _Step.READING:
            assert run.region is not None
            self._slot.send(ReadProbe(region=run.region, for_s=READ_FOR_S))
        elif run.step is _Step.SERVING:
            self._slot.send(ServeProbe(size_bytes=run.requested.size_bytes))

    def mover_lost(self, refusal: Refusal) -> None:
        """Fail the direction that needs the mover."""
        assert self._run is not None
        error = KvxferdError(refusal.message, refusal.code, retry_after_s=refusal.retry_after_s)
        self._direction_failed(error)

    def handle_mover_message(self, message: FromMover) -> None:
        """Handle what this node's mover reports. A message of another step is void."""
        run = self._run
        assert run is not None
        match message, run.step:
            case ProbeFinished(), _Step.READING:
                run.read = direction_of(self._slot.with_transports(message.read))
                self._serve()
            case ProbeServed(), _Step.SERVING:
                self._request_read_back(run, message.region)
            case ProbeFailed(), _:
                self._direction_failed(KvxferdError(message.message, message.code))

    def _direction_failed(self, error: KvxferdError) -> None:
        assert self._run is not None
        if self._run.step is _Step.READING:
            self._read_failed(error)
        else:
            self._end(read_back=_failed(error))

    def _read_failed(self, error: KvxferdError) -> None:
        """Go on with the other direction, by another mover: reads of this one may still be in flight."""
        assert self._run is not None
        self._run.read = _failed(error)
        self._slot.kill_mover()
        self._serve()

    # --- the other direction

    def _serve(self) -> None:
        run = self._run
        assert run is not None
        run.step = _Step.SERVING
        self._slot.set_deadline(
            STEP_S, lambda: self._end(read_back=_failed(_deadline_error("this node's mover")))
        )
        if self._slot.has_mover:
            self.mover_ready()
        else:
            self._slot.request_mover()

    def _request_read_back(self, run: _Run, region: ProbeRegion) -> None:
        run.step = _Step.READ_BACK
        event = run.requested
        self._slot.set_deadline(
            READ_BACK_LIMIT_S, lambda: self._end(read_back=_failed(_deadline_error("the peer")))
        )
        self._request_peer(
            event.endpoint,
            lambda number: ReadProbeBack(request=number, probe=event.probe, region=region),
            READ_BACK_TIMEOUT_S,
            lambda reply: self._read_back(run, reply),
        )

    def _read_back(self, run: _Run, reply: ReplyMessage) -> None:
        if run is not self._run or run.step is not _Step.READ_BACK:
            return
        if not isinstance(reply, ProbeReport):
            refused = as_refusal(reply)
            self._end(read_back=_failed(PeerError(refused.message, refused.code)))
            return
        try:
            reply.read.check(run.requested.size_bytes)
        except ProtocolError as error:
            self._end(read_back=_failed(error))
            return
        self._end(read_back=direction_of(reply.read))

    # --- the end

    def _end(self, read_back: ProbeDirection | None = None, error: KvxferdError | None = None) -> None:
        run, self._run = self._run, None
        assert run is not None
        self._slot.release()
        if run.region is not None:
            self._request_peer(
                run.requested.endpoint,
                lambda number: EndProbe(request=number, probe=run.requested.probe),
                END_TIMEOUT_S,
                lambda reply: None,
            )
        self._report(run, read_back, error)

    def _report(
        self, run: _Run, read_back: ProbeDirection | None = None, error: KvxferdError | None = None
    ) -> None:
        record = ProbeRecord(
            probe=run.requested.probe,
            role=REQUESTED,
            peer=run.requested.endpoint,
            size_bytes=run.requested.size_bytes,
            elapsed_s=round(self._context.now - run.started_at, 6),
            code=None if error is None else error.code,
            message="" if error is None else error.message,
            retry_after_s=0.0 if error is None else error.retry_after_s,
            read=run.read,
            read_back=read_back,
        )
        self._context.emit(ReportProbe(record))


def _failed(error: KvxferdError) -> ProbeDirection:
    return ProbeDirection(code=error.code, message=error.message)


def _deadline_error(what: str) -> KvxferdError:
    return KvxferdError(f"cannot probe: {what} did not come in time", Code.DEADLINE)
