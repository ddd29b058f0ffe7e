"""A mover: takes the daemon's messages, keeps pulls going, and polls no more than it must."""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import assert_never

import msgspec

from kvxferd.errors import Code, KvxferdError, ProtocolError
from kvxferd.ids import PullId, Ticket
from kvxferd.link import Link, close_all, close_frames, duplicates
from kvxferd.memory.driver import PLACEMENT_VARIABLE
from kvxferd.mover.binding import Bindings
from kvxferd.mover.disconnects import Disconnects
from kvxferd.mover.notices import Notices
from kvxferd.mover.pacing import Pacer
from kvxferd.mover.pulls import PullEngine
from kvxferd.mover.staging import StagedTransport
from kvxferd.mover.transport import Transport
from kvxferd.plan import MAX_RUNS
from kvxferd.polling import FinePoll
from kvxferd.wire import mover as wire
from kvxferd.wire.codec import TO_MOVER, encode
from kvxferd.wire.common import BlockIds, Descriptors, Message
from kvxferd.wire.descriptors import EarlyDescriptors
from kvxferd.wire.framing import Frame
from kvxferd.wire.ids_stream import IdsAssembly
from kvxferd.wire.worker import Delivered, RegionExport

_LOG = logging.getLogger(__name__)


class Mover:
    """One agent, one thread, one daemon at the other end of the stream."""

    def __init__(
        self,
        stream: Link,
        transport: Transport,
        pacer: Pacer,
        watch_worker: Callable[[int], None],
        *,
        own: Sequence[RegionExport] = (),
        max_runs: int = MAX_RUNS,
    ) -> None:
        """`own`: as `Bindings` takes it. `max_runs`: about as many runs are worked out at a time."""
        self._stream = stream
        self._disconnects = Disconnects()
        self._transport = StagedTransport(transport, disconnects=self._disconnects)
        self._watch_worker = watch_worker
        self._engine = PullEngine(self._transport, max_runs=max_runs, disconnects=self._disconnects)
        self._bindings = Bindings(
            self._transport, own=own, always_stage=os.environ.get(PLACEMENT_VARIABLE) == "staged"
        )
        self._ids = IdsAssembly()
        self._early = EarlyDescriptors()
        self._pacer = pacer
        self._attended = False
        self._notices: Notices | None = None  # none: the daemon tells the worker everything
        self._tickets: dict[PullId, Ticket] = {}  # of the pulls that it would be told of
        self._answer: wire.Bound | wire.BindRefused | None = None  # until the descriptors are closed
        self._arrivals = select.poll()  # costs a third of the other, but counts in ms
        self._arrivals.register(stream.fileno(), select.POLLIN)
        self._fine_arrivals = FinePoll(stream.fileno())

    def serve(self) -> None:
        """Run until the daemon closes its end. Raises ProtocolError if it sends nonsense."""
        self._send(wire.Up(agent=self._transport.agent, library=self._transport.library, pid=os.getpid()))
        has_ended = False
        while not has_ended:
            self._work()
            while self._engine.outbox:
                self._report(self._engine.outbox.popleft())
            if not self._stream.idle:
                self._stream.flush()
            if self._wait():
                has_ended = self._take()

    def unmap(self) -> None:
        """Let go of all that was mapped. Only when the transport is closed."""
        self._bindings.close()
        close_all(self._early.take())
        if self._notices is not None:
            self._notices.close()

    def _report(self, message: wire.FromMover) -> None:
        """Tell the daemon; that a pull is delivered, its worker first, which waits for just that."""
        if isinstance(message, wire.PullDone):
            ticket = self._tickets.pop(message.pull, None)
            outcome = message.outcome
            if ticket is not None and outcome.delivered and self._notify(ticket, outcome):
                outcome = msgspec.structs.replace(outcome, told=True)
                message = msgspec.structs.replace(message, outcome=outcome)
        self._send(message)

    def _notify(self, ticket: Ticket, outcome: wire.PullOutcome) -> bool:
        delivered = Delivered(ticket=ticket, bytes=outcome.bytes, runs=outcome.runs, wire_s=outcome.wire_s)
        return self._notices is not None and self._notices.tell(delivered)

    def _take(self) -> bool:
        """Handle what has arrived; return whether the daemon has closed its end."""
        frames = self._stream.receive()
        waiting = iter(frames or ())
        try:
            for frame in waiting:
                self._pacer.moved()
                try:
                    self._handle(frame)
                finally:
                    close_all(frame.fds)
                self._answer_bind()
        finally:
            close_frames(waiting)  # behind one that cannot be taken: a resident mover's process goes on
        return frames is None

    def _work(self) -> None:
        if not (self._attended or self._engine.is_busy):
            return
        began = time.perf_counter()
        moved = again = self._engine.step() if self._engine.is_busy else False
        while again and self._engine.is_busy and time.perf_counter() - began < self._pacer.quick_s:
            again = self._engine.step()
        if not self._engine.is_polling:
            self._transport.progress()
        if moved:
            self._pacer.moved()
        else:
            self._pacer.worked(time.perf_counter() - began)

    def _wait(self) -> bool:
        """Return whether there is something to take, after a pause if it is time for one."""
        pause: float | None = None
        if self._attended or self._engine.is_busy:
            pause = self._pacer.pause_s(self._engine.is_busy)
            if pause == 0.0:
                return bool(self._arrivals.poll(0))
        if self._bindings.has_pages_to_map and not self._engine.is_busy:
            self._bindings.map_pages()
            return bool(self._arrivals.poll(0))
        return self._fine_arrivals.wait(pause, writable=not self._stream.idle)

    def _send(self, message: Message) -> None:
        self._stream.send(encode(message))

    def _handle(self, frame: Frame) -> None:
        message = TO_MOVER.decode(frame.payload)
        match message:
            case Descriptors():
                copies = duplicates(frame.fds)
                try:
                    void = self._early.add(message.first, copies)
                except ProtocolError:
                    close_all(copies)
                    raise
                close_all(void)
            case wire.Bind():
                early = self._early.take()
                try:
                    self._bind(message, (*early, *frame.fds))
                finally:
                    close_all(early)
            case wire.MapFence():
                if len(frame.fds) != 1:
                    raise ProtocolError(f"cannot map a fence page from {len(frame.fds)} descriptors")
                self._send(self._map_fence(message, frame.fds[0]))
            case wire.UnmapFence():
                self._bindings.unmap_fence(message.session)
            case wire.Attend():
                self._attend(message)
            case wire.LoadPlan():
                self._engine.load_plan(message.digest, message.encoded)
            case wire.LoadRemote():
                self._engine.meet(message.agent, message.metadata, message.word)
            case wire.DropRemote():
                self._engine.drop(message.agent)
            case BlockIds():
                self._ids.add(message)
            case wire.StartPull():
                if self._notices is not None and message.ticket is not None:
                    self._tickets[message.pull] = message.ticket
                self._engine.start(self._joined(message))
            case wire.AbortPull():
                self._engine.abort(message.pull)
            case wire.DisconnectJudged():
                self._disconnects.judged(message.number, message.over)
            case _:
                assert_never(message)

    def _bind(self, message: wire.Bind, fds: tuple[int, ...]) -> None:
        try:
            num_last = 2 if message.notices else 1
            if len(fds) < num_last:
                raise ProtocolError("cannot bind without the worker's pidfd, and the notices that it has")
            with ExitStack() as undoing:
                # Before anything is bound: where no descriptor is left, nothing is, and it is tried again.
                notices, worker = _copies(fds[-2:] if message.notices else (-1, fds[-1]))
                undoing.callback(close_all, (notices, worker))
                answer = self._bindings.bind(message.regions, fds[:-num_last])
                self._engine.bind(answer.regions, self._bindings.flush)
                undoing.pop_all()
            if message.notices:
                self._heed(notices)
            self._watch_worker(worker)
            self._answer = answer
        except KvxferdError as error:
            self._answer = wire.BindRefused(code=error.code, message=error.message)
        except Exception as error:
            _LOG.exception("cannot bind")
            self._answer = wire.BindRefused(code=Code.INTERNAL, message=f"cannot bind: {error!r}")

    def _map_fence(self, message: wire.MapFence, fd: int) -> wire.FenceMapped | wire.FenceRefused:
        """A page that cannot be used is its session's trouble alone: this mover serves others."""
        try:
            return self._bindings.map_fence(message.session, message.size_bytes, fd)
        except KvxferdError as error:
            return wire.FenceRefused(session=message.session, code=error.code, message=error.message)
        except Exception as error:
            _LOG.exception("cannot map a fence page")
            text = f"cannot map a fence page: {error!r}"
            return wire.FenceRefused(session=message.session, code=Code.INTERNAL, message=text)

    def _heed(self, fd: int) -> None:
        """Write what is delivered to the worker's notices; where that is no socket, the daemon tells it.

        Once: a mover is bound once, and a second `Bind` is refused before it comes here.
        """
        try:
            self._notices = Notices(fd)
        except OSError as error:
            _LOG.warning("cannot tell the worker anything: its notices are no socket (%s)", error)
            os.close(fd)

    def _answer_bind(self) -> None:
        """Host memory is registered for certain: the worker is not kept waiting for the proof."""
        if (answer := self._answer) is None:
            return
        self._answer = None
        self._send(answer)
        if isinstance(answer, wire.Bound):
            self._stream.flush()
            if (proved := self._bindings.prove(answer.placement)) is not None:
                self._send(wire.Proved(placement=proved))

    def _joined(self, message: wire.StartPull) -> wire.StartPull:
        if not message.stream:
            return message
        return msgspec.structs.replace(
            message,
            local=self._ids.complete(message.local, message.stream),
            remote=self._ids.complete(message.remote, message.stream + 1),
        )

    def _attend(self, message: wire.Attend) -> None:
        self._attended = message.on
        if message.on:
            self._transport.progress()
            self._send(wire.Attending(token=message.token))


def _copies(fds: Sequence[int]) -> tuple[int, ...]:
    """Return copies of those that there are. Raises OSError, and then keeps none."""
    copies = iter(duplicates(fd for fd in fds if fd >= 0))
    return tuple(next(copies) if fd >= 0 else -1 for fd in fds)
