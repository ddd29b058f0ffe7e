"""The worker's side of the worker socket by hand, past the client: whatever a test or an attack wants."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import time
from typing import Any

from kvxferd.errors import ProtocolError
from kvxferd.frame_socket import FrameSocket
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.wire import worker
from kvxferd.wire.codec import DAEMON_MESSAGES, encode
from kvxferd.wire.common import Message
from kvxferd.wire.framing import encode_frame

WAIT_S = 10.0
REPLIES = (worker.Registered, worker.Refused, worker.Farewell)  # to a registration


def frame(message: Message, num_fds: int = 0) -> bytes:
    return encode_frame(encode(message), num_fds)


def connected(path: str) -> socket.socket:
    """A connection, however long the queue before it is; what is sent and read waits for 3 s."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 3, 0))
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 3, 0))
    made.connect(path)
    return made


class RawWorker:
    """A connection to a worker socket."""

    def __init__(self, path: str, hello: bool = True) -> None:
        self.socket = connected(path)
        self._link = FrameSocket(self.socket.dup())  # which makes both non-blocking: each waits by itself
        self._heard: list[Message] = []
        self.fds: list[int] = []  # that came along
        self.ended = False
        self.acknowledges = True  # each mover that is offered
        if hello:
            self.say(worker.Hello(versions=worker.WORKER_VERSIONS, client="by hand"))
            self.next()

    def say(self, message: Message, *fds: int) -> None:
        self.raw(frame(message, len(fds)), *fds)

    def raw(self, content: bytes, *fds: int) -> None:
        """Send all of it. Raises OSError where the other side has closed or takes nothing for long."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        view, until = memoryview(content), time.monotonic() + WAIT_S
        while view:
            try:
                sent = self.socket.sendmsg([view], rights, socket.MSG_NOSIGNAL)
                view, rights = view[sent:], []
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError("the daemon takes nothing more") from None
                poll = select.poll()
                poll.register(self.socket, select.POLLOUT)
                poll.poll(200)

    def next(self, wait_s: float = WAIT_S) -> Message | None:
        """The next message; None at the end of the connection, and where none comes in time."""
        until = time.monotonic() + wait_s
        poll = select.poll()
        poll.register(self._link.fileno(), select.POLLIN)
        while not self._heard and not self.ended and (left := until - time.monotonic()) > 0:
            if not poll.poll(left * 1e3):
                break
            try:
                frames = self._link.receive()
            except ProtocolError:
                frames = None
            if frames is None:
                self.ended = True
                break
            for got in frames:
                self._heard.append(DAEMON_MESSAGES.decode(got.payload))
                self.fds += got.fds
        return self._heard.pop(0) if self._heard else None

    def await_one(self, kind: type[Message] | tuple[type[Message], ...], wait_s: float = WAIT_S) -> Any:
        """The next message of that kind; None where none comes."""
        until = time.monotonic() + wait_s
        while (left := until - time.monotonic()) > 0:
            message = self.next(left)
            if isinstance(message, worker.MoverOffered) and self.acknowledges:
                self.say(worker.MoverAcknowledged(number=message.number))
            if message is None or isinstance(message, kind):
                return message
        return None

    def register(
        self,
        spec: EngineSpec,
        layout: RankLayout,
        *fds: int,
        deliveries: int | None = None,
        replies: tuple[type[Message], ...] = REPLIES,
        wait_s: float = 20.0,
        region: dict[str, Any] | None = None,
        **more: Any,
    ) -> Any:
        """Be a rank, with these descriptors for its region and one for deliveries behind them.

        Returns the first of `replies`. `region`: facts of the region's export; `more`: of the registration.
        """
        (own,) = layout.regions
        facts = {"region": own.region, "size_bytes": own.size_bytes} | (region or {})
        facts_of_rank = {"incarnation": os.urandom(8).hex()} | more
        register = worker.Register(
            request=1, engine=spec, layout=layout, regions=(worker.RegionExport(**facts),), **facts_of_rank
        )
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as unread:
            self.say(register, *fds, unread.fileno() if deliveries is None else deliveries)
        return self.await_one(replies, wait_s)

    def bring_ended_mover(self, spec: EngineSpec, layout: RankLayout, *fds: int) -> Any:
        """Be a rank that brings a resident mover which has ended. Returns the reply."""
        brought, ended = socket.socketpair()
        ended.close()
        with brought:
            return self.register(spec, layout, *fds, brought.fileno(), placement="resident")

    def close(self) -> None:
        self.socket.close()
        self._link.close()
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)
