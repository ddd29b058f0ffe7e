"""A mover: takes the daemon's messages, keeps pulls going, and polls no more than it must."""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Callable
from typing import assert_never

import msgspec

from kvxferd.errors import Code, KvxferdError, ProtocolError
from kvxferd.link import Link
from kvxferd.mover.binding import Bindings
from kvxferd.mover.pacing import Pacer
from kvxferd.mover.pulls import PullEngine
from kvxferd.mover.transport import Transport
from kvxferd.wire import mover as wire
from kvxferd.wire.codec import TO_MOVER, encode
from kvxferd.wire.common import BlockIds, Message
from kvxferd.wire.framing import Frame
from kvxferd.wire.ids_stream import IdsAssembly

_LOG = logging.getLogger(__name__)

# The posts of a small pull, its fence word's included, follow one another. What takes longer is
# a large one's, and the daemon's messages are looked at in between.
QUICK_S = 300e-6


class Mover:
    """One agent, one thread, one daemon at the other end of the stream."""

    def __init__(
        self,
        stream: Link,
        transport: Transport,
        is_crowded: Callable[[], bool],
        watch_worker: Callable[[int], None],
    ) -> None:
        self._stream = stream
        self._transport = transport
        self._watch_worker = watch_worker
        self._engine = PullEngine(transport)
        self._bindings = Bindings(transport)
        self._ids = IdsAssembly()
        self._pacer = Pacer(is_crowded)
        self._attended = False
        self._arrivals = select.poll()  # unlike select, it costs nothing to speak of; but it counts in ms
        self._arrivals.register(stream.fileno(), select.POLLIN)

    def serve(self) -> None:
        """Run until the daemon closes its end. Raises ProtocolError if it sends nonsense."""
        self._send(wire.Up(agent=self._transport.agent, library=self._transport.library, pid=os.getpid()))
        has_ended = False
        while not has_ended:
            self._work()
            while self._engine.outbox:
                self._send(self._engine.outbox.popleft())
            if not self._stream.idle:
                self._stream.flush()
            if self._wait():
                has_ended = self._take()

    def _take(self) -> bool:
        """Handle what has arrived; return whether the daemon has closed its end."""
        frames = self._stream.receive()
        for frame in frames or ():
            self._pacer.moved()
            try:
                self._handle(frame)
            finally:
                for fd in frame.fds:
                    os.close(fd)
        return frames is None

    def _work(self) -> None:
        if not (self._attended or self._engine.is_busy):
            return
        began = time.perf_counter()
        moved = again = self._engine.step() if self._engine.is_busy else False
        while again and self._engine.is_busy and time.perf_counter() - began < QUICK_S:
            again = self._engine.step()
        if not self._engine.num_flights:  # polling a flight drives the library as well
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
        link = self._stream.fileno()
        readable, _, _ = select.select([link], [link] if not self._stream.idle else [], [], pause)
        return bool(readable)

    def _send(self, message: Message) -> None:
        self._stream.send(encode(message))

    def _handle(self, frame: Frame) -> None:
        message = TO_MOVER.decode(frame.payload)
        match message:
            case wire.Bind():
                self._bind(message, frame.fds)
            case wire.MapFence():
                if len(frame.fds) != 1:
                    raise ProtocolError(f"cannot map a fence page from {len(frame.fds)} descriptors")
                self._send(self._bindings.map_fence(message.session, message.size_bytes, frame.fds[0]))
            case wire.UnmapFence():
                self._bindings.unmap_fence(message.session)
            case wire.Attend():
                self._attend(message)
            case wire.LoadPlan():
                self._engine.load_plan(message.digest, message.encoded)
            case wire.LoadRemote():
                self._engine.remotes.load(message.agent, message.metadata)
            case wire.DropRemote():
                self._engine.remotes.drop(message.agent)
            case BlockIds():
                self._ids.add(message)
            case wire.StartPull():
                self._engine.start(self._joined(message))
            case wire.AbortPull():
                self._engine.abort(message.pull)
            case _:
                assert_never(message)

    def _bind(self, message: wire.Bind, fds: tuple[int, ...]) -> None:
        answer: wire.Bound | wire.BindRefused
        try:
            if not fds:
                raise ProtocolError("cannot bind without the worker's pidfd")
            answer = self._bindings.bind(message.regions, fds[:-1])
            self._engine.bind({region.region: region.address for region in answer.regions})
            self._watch_worker(os.dup(fds[-1]))
        except KvxferdError as error:
            answer = wire.BindRefused(code=error.code, message=error.message)
        except Exception as error:
            _LOG.exception("cannot bind")
            answer = wire.BindRefused(code=Code.INTERNAL, message=f"cannot bind: {error!r}")
        self._send(answer)

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
