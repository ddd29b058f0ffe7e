"""A worker that sends frames of its own making, past the client."""

from __future__ import annotations

import os
import select
import socket

from kvxferd.errors import ProtocolError
from kvxferd.frame_socket import FrameSocket
from kvxferd.wire import worker
from kvxferd.wire.codec import DAEMON_MESSAGES, encode
from kvxferd.wire.common import Message
from kvxferd.wire.framing import HEADER

WAIT_S = 10.0


class Raw:
    """A worker-socket connection that says whatever a test wants."""

    def __init__(self, path: str, hello: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(path)
        self.link = FrameSocket(self.socket.dup())
        self.deliveries, self._mover_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.received: list[Message] = []
        self.ended = False
        if hello:
            self.say(worker.Hello(versions=worker.WORKER_VERSIONS, client="raw"))
            assert isinstance(self.next(), worker.Welcome)

    def close(self) -> None:
        self.socket.close()
        self.link.close()
        self.deliveries.close()
        self._mover_end.close()

    def say(self, message: Message, *fds: int) -> None:
        self.raw(HEADER.pack(len(encode(message)), len(fds), 0) + encode(message), *fds)

    def register(self, message: worker.Register, *fds: int) -> None:
        """Register, with the socket for deliveries behind the descriptors."""
        self.say(message, *fds, self._mover_end.fileno())

    def raw(self, content: bytes, *fds: int) -> None:
        try:
            socket.send_fds(self.socket, [content], list(fds))
        except (BrokenPipeError, ConnectionResetError):
            self.ended = True

    def next(self) -> Message | None:
        """The next message, None at the end of the connection."""
        while not self.received and not self.ended:
            self.socket.settimeout(WAIT_S)
            ready, _, _ = select.select([self.link], [], [], WAIT_S)
            assert ready, "the daemon says nothing"
            try:
                frames = self.link.receive()
            except ProtocolError:
                frames = None
            if frames is None:
                self.ended = True
                break
            for frame in frames:
                self.received.append(DAEMON_MESSAGES.decode(frame.payload))
                for fd in frame.fds:
                    os.close(fd)
        match self.received[:1]:
            case [worker.EngineRanks()]:  # comes when it comes
                self.received.pop(0)
                return self.next()
            case [worker.MoverOffered(number=number)]:
                self.received.pop(0)
                self.say(worker.MoverAcknowledged(number=number))
                return self.next()
        return self.received.pop(0) if self.received else None

    def answer(self) -> Message | None:
        """The next message that is no mover's, which are acknowledged, and no report of ranks."""
        while isinstance(message := self.next(), worker.MoverOffered | worker.EngineRanks):
            if isinstance(message, worker.MoverOffered):
                self.say(worker.MoverAcknowledged(number=message.number))
        return message

    def farewell(self) -> worker.Farewell:
        """What the daemon says before it closes."""
        found = None
        while (message := self.next()) is not None:
            found = message
        assert isinstance(found, worker.Farewell)
        return found
