"""A mover's loop: it handles the daemon's messages, moves pulls on, and polls no more than it must."""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import assert_never

import msgspec

from kvxferd.errors import Code, KvxferdError, ProtocolError
from kvxferd.fd_wait import PreciseWait
from kvxferd.frame_socket import FrameSocket, close_fds, dup_fds
from kvxferd.ids import PullId, Ticket
from kvxferd.mover.chunks.chunk_pool import ChunkPool
from kvxferd.mover.chunks.scatterer import Scatterer
from kvxferd.mover.process.backoff import PollBackoff
from kvxferd.mover.process.binding import Bindings
from kvxferd.mover.reads.pull_engine import PullEngine
from kvxferd.mover.transport.base import Transport
from kvxferd.mover.transport.staging import StagedTransport
from kvxferd.mover.transport.ucx_lines import UcxLines
from kvxferd.plan import MAX_RUNS
from kvxferd.wire import mover as wire
from kvxferd.wire.block_id_parts import BlockIdAssembly
from kvxferd.wire.codec import TO_MOVER, encode
from kvxferd.wire.common import BlockIds, FdBatch, Message, Refusal
from kvxferd.wire.fd_batches import FdBatchAssembly
from kvxferd.wire.framing import Frame
from kvxferd.wire.worker import RegionExport, TicketDelivered

_LOG = logging.getLogger(__name__)

NO_PIECES = wire.PiecesRead(bytes=0, runs=0, wire_s=0.0)
_UNDELAYED = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
NUM_WORKER_FDS = 2  # the last of `Bind`: the worker's delivery socket and its pidfd
IDLE_CHECK_S = 1.0  # between two looks at whether chunks are idle, while there are any


class MoverLoop:
    """One agent, one thread, one daemon at the other end of the stream."""

    def __init__(
        self,
        stream: FrameSocket,
        transport: Transport,
        backoff: PollBackoff,
        watch_worker: Callable[[int], None],
        *,
        own_regions: Sequence[RegionExport] = (),
        max_runs: int = MAX_RUNS,
        ucx_lines: UcxLines | None = None,
    ) -> None:
        """`own_regions`: as `Bindings` takes it. `max_runs`: about how many runs are expanded at a time.

        `ucx_lines`: of this process, where it is a mover's own.
        """
        self._stream = stream
        outbox: deque[wire.FromMover] = deque()
        self._transport = StagedTransport(transport, report=outbox.append)
        self._watch_worker = watch_worker
        self._chunks = ChunkPool(self._transport, report=outbox.append)
        self._engine = PullEngine(
            self._transport,
            self._chunks,
            max_runs=max_runs,
            outbox=outbox,
            scatterer=Scatterer(),
        )
        self._bindings = Bindings(self._transport, own_regions=own_regions)
        self._early_block_ids = BlockIdAssembly()
        self._early_fds = FdBatchAssembly()
        self._backoff = backoff
        self._is_polling = False
        self._next_idle_check = 0.0
        # The writing end, by which deliveries are reported to the worker directly; None: the daemon does it.
        self._delivery_socket: socket.socket | None = None
        # Of the pulls whose delivery goes to the worker directly, with what earlier pieces of each have read.
        self._tickets: dict[PullId, tuple[Ticket, wire.PiecesRead]] = {}
        self._ucx_lines = ucx_lines
        self._is_bound = False
        self._bind_reply: wire.Bound | wire.BindRefused | None = None  # until the descriptors are closed
        self._readable_ms = select.poll()  # costs a third of `PreciseWait`, but counts in milliseconds
        self._readable_ms.register(stream.fileno(), select.POLLIN)
        self._readable_us = PreciseWait(stream.fileno())

    def serve(self) -> None:
        """Run until the daemon closes its end. Raises ProtocolError where it sends a malformed message."""
        self._send(
            wire.MoverUp(agent=self._transport.agent, library=self._transport.library, pid=os.getpid())
        )
        has_ended = False
        while not has_ended:
            self._work()
            self._report_all()
            if not self._stream.is_flushed:
                self._stream.flush()
            if self._wait():
                has_ended = self._receive()

    def close(self) -> None:
        """Unmap and close everything. Call it only when the transport is closed.

        Returns when no scatter runs, however long that takes: the worker may use its memory again then.
        """
        self._engine.close()
        self._bindings.close()
        close_fds(self._early_fds.pop_all())
        if self._delivery_socket is not None:
            self._delivery_socket.close()

    def _report_all(self) -> None:
        while self._engine.outbox:
            self._report(self._engine.outbox.popleft())

    def _report(self, message: wire.FromMover) -> None:
        """Report to the daemon. A delivery goes to the worker first, because the engine is waiting for it."""
        if isinstance(message, wire.PullDone):
            waiting = self._tickets.pop(message.pull, None)
            outcome = message.outcome
            if waiting is not None and outcome.delivered and self._notify_worker(*waiting, outcome):
                outcome = msgspec.structs.replace(outcome, sent_to_worker=True)
                message = msgspec.structs.replace(message, outcome=outcome)
        self._send(message)

    def _notify_worker(self, ticket: Ticket, before: wire.PiecesRead, outcome: wire.PullOutcome) -> bool:
        """Return whether it was sent; never waits. False where the worker has too many unread, or is gone."""
        if self._delivery_socket is None:
            return False
        delivered = TicketDelivered(
            ticket=ticket,
            bytes=before.bytes + outcome.bytes,
            runs=before.runs + outcome.runs,
            wire_s=before.wire_s + outcome.wire_s,
        )
        try:
            self._delivery_socket.send(encode(delivered), _UNDELAYED)
        except OSError:
            return False
        return True

    def _receive(self) -> bool:
        """Handle what has arrived; return whether the daemon has closed its end."""
        return self._stream.handle_frames(self._handle_frame) is None

    def _handle_frame(self, frame: Frame) -> None:
        self._backoff.reset()
        try:
            self._handle(frame)
        finally:
            close_fds(frame.fds)
        self._send_bind_reply()

    def _work(self) -> None:
        if not (self._is_polling or self._engine.is_busy):
            return
        began = time.perf_counter()
        moved = again = self._engine.step() if self._engine.is_busy else False
        while again and self._engine.is_busy and time.perf_counter() - began < self._backoff.burst_s:
            again = self._engine.step()
        self._report_all()  # an engine waits for it, and nobody for the library's other work
        if not self._engine.num_inflight:
            began = time.perf_counter()  # a step that waits for a scatter is long, and no call of the library
            self._transport.progress()
        if moved:
            self._backoff.reset()
        else:
            self._backoff.record_call(time.perf_counter() - began)
        if began >= self._next_idle_check:  # peers may read from here for hours
            self._release_idle_chunks()

    def _release_idle_chunks(self) -> None:
        self._next_idle_check = time.perf_counter() + IDLE_CHECK_S
        self._chunks.release_idle(time.perf_counter())

    def _wait(self) -> bool:
        """Pause if it is time to, and return whether the stream is readable."""
        pause: float | None = None
        if self._is_polling or self._engine.is_busy:
            pause = self._backoff.pause_s(self._engine.is_busy)
            if pause == 0.0:
                return bool(self._readable_ms.poll(0))
        self._report_transports()
        if self._bindings.has_pages_to_prefault and not self._engine.is_busy:
            self._bindings.prefault_some()
            return bool(self._readable_ms.poll(0))
        if pause is None and self._chunks.is_wanted:
            self._release_idle_chunks()
            pause = IDLE_CHECK_S
        return self._readable_us.wait(pause, writable=not self._stream.is_flushed)

    def _send(self, message: Message) -> None:
        self._stream.send(encode(message))

    def _handle(self, frame: Frame) -> None:
        message = TO_MOVER.decode(frame.payload)
        match message:
            case wire.StartPull():
                if self._delivery_socket is not None and message.ticket is not None:
                    self._tickets[message.pull] = (message.ticket, message.before or NO_PIECES)
                self._engine.start(self._with_early_block_ids(message))
            case FdBatch():
                self._keep_early_fds(message.first, frame.fds)
            case wire.Bind():
                early = self._early_fds.pop_all()
                try:
                    self._bind(message, (*early, *frame.fds))
                finally:
                    close_fds(early)
            case wire.MapFence():
                if len(frame.fds) != 1:
                    raise ProtocolError(f"cannot map a fence page from {len(frame.fds)} descriptors")
                self._send(self._map_fence(message, frame.fds[0]))
            case wire.UnmapFence():
                self._bindings.unmap_fence(message.session)
            case wire.SetPolling():
                self._set_polling(message)
            case wire.LoadPlan():
                self._engine.load_plan(message.digest, message.encoded)
            case wire.DropPlan():
                self._engine.drop_plan(message.digest)
            case wire.LoadRemote():
                self._engine.add_remote(message.agent, message.metadata, message.word)
            case wire.DropRemote():
                self._engine.drop_remote(message.agent)
            case BlockIds():
                self._early_block_ids.add(message)
            case wire.AbortPull():
                self._engine.abort(message.pull)
            case wire.ReportPull():
                self._engine.report_progress(message.pull)
            case wire.ChunkMemoryGranted():
                self._chunks.set_grant(message.num_chunks, time.perf_counter())
            case _:
                assert_never(message)

    def _keep_early_fds(self, first: int, fds: tuple[int, ...]) -> None:
        copies = dup_fds(fds)
        try:
            void = self._early_fds.add(first, copies)
        except ProtocolError:
            close_fds(copies)
            raise
        close_fds(void)

    def _bind(self, message: wire.Bind, fds: tuple[int, ...]) -> None:
        try:
            if len(fds) < NUM_WORKER_FDS:
                raise ProtocolError("cannot bind without the worker's delivery socket and its pidfd")
            with ExitStack() as undoing:
                # Before anything is bound: where no descriptor is left, nothing is bound, and the daemon can
                # try again.
                delivery_fd, worker = dup_fds(fds[-NUM_WORKER_FDS:])
                undoing.callback(close_fds, (delivery_fd, worker))
                bound = self._bindings.bind(
                    message.regions,
                    fds[:-NUM_WORKER_FDS],
                    device_placement=message.device_placement,
                    scatters=message.read_way is not wire.ReadWay.DIRECT,
                )
                bindings = self._bindings
                self._engine.bind(bound.regions, bindings.flush, bindings.device_scatterer, message.read_way)
                undoing.pop_all()
            self._open_delivery_socket(delivery_fd)
            self._watch_worker(worker)
            self._bind_reply = bound
        except Exception as error:
            refusal = _refusal_of(error, "bind")
            self._bind_reply = wire.BindRefused(code=refusal.code, message=refusal.message)

    def _map_fence(self, message: wire.MapFence, fd: int) -> wire.FenceMapped | wire.FenceRefused:
        """Map a page, or return why not. A page that cannot be used concerns its session alone."""
        try:
            return self._bindings.map_fence(message.session, message.size_bytes, fd)
        except Exception as error:
            refusal = _refusal_of(error, "map a fence page")
            return wire.FenceRefused(session=message.session, code=refusal.code, message=refusal.message)

    def _open_delivery_socket(self, fd: int) -> None:
        """Send deliveries to the worker by this descriptor. Where it is no socket, the daemon sends them.

        Called once: a mover is bound once, and a second `Bind` is refused before.
        """
        try:
            self._delivery_socket = socket.socket(fileno=fd)
        except OSError as error:
            _LOG.warning("delivery socket not usable: reason=%s", error)
            os.close(fd)

    def _send_bind_reply(self) -> None:
        """Send the reply to `Bind`, then probe: host memory is registered, and the worker need not wait."""
        if (reply := self._bind_reply) is None:
            return
        self._bind_reply = None
        if isinstance(reply, wire.BindRefused):
            self._send(reply)
            return
        self._is_bound = True
        self._report_transports()
        self._send(reply)
        self._stream.flush()
        if (placement := self._bindings.probe_host_memory(reply.placement)) is not None:
            self._report_transports()
            self._send(wire.ProbeResult(placement=placement))

    def _report_transports(self) -> None:
        """Read UCX's lines; report new transports once the daemon has a rank for them."""
        if self._ucx_lines is None:
            return
        self._ucx_lines.read()
        if self._is_bound:
            for used in self._ucx_lines.take_new():
                seen = wire.TransportsSeen(
                    reach=used.reach,
                    transports=used.transports[: wire.MAX_TRANSPORTS],
                    is_fully_parsed=used.is_fully_parsed,
                )
                self._send(seen)

    def _with_early_block_ids(self, message: wire.StartPull) -> wire.StartPull:
        if not self._early_block_ids.num_bytes:
            return message
        return msgspec.structs.replace(
            message,
            local=self._early_block_ids.complete(message.local, message.stream),
            remote=self._early_block_ids.complete(message.remote, message.stream + 1),
        )

    def _set_polling(self, message: wire.SetPolling) -> None:
        self._is_polling = message.on
        if message.on:
            self._transport.progress()
            self._send(wire.Polling(token=message.token))


def _refusal_of(error: Exception, aim: str) -> Refusal:
    """Return what the daemon is told of an error. One that nobody expects is logged, too."""
    match error:
        case KvxferdError():
            return Refusal(error.code, error.message)
        case OSError(errno=errno.EMFILE | errno.ENFILE):  # whoever ends gives descriptors back
            return Refusal(Code.BUSY, f"cannot {aim}: {error.strerror}; try again later")
    _LOG.error("not done: %s", aim, exc_info=error)
    return Refusal(Code.INTERNAL, f"cannot {aim}: {error!r}; see the log")
