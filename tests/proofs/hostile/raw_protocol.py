"""The protocols spoken by hand: a worker's connection, and a peer's."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import time
from typing import Any

import zmq
from zmq.utils import z85

from kvxferd.control.curve_keys import CurveKeyPair
from kvxferd.errors import ProtocolError
from kvxferd.frame_socket import FrameSocket
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.layout.presets import attention_layout
from kvxferd.memory import SealedMemory
from kvxferd.wire import worker
from kvxferd.wire.codec import DAEMON_MESSAGES, PEER_MESSAGES, encode
from kvxferd.wire.common import Message, Versions
from kvxferd.wire.endpoint import address_of, key_of
from kvxferd.wire.framing import HEADER
from kvxferd.wire.peer import PEER_VERSIONS, PeerHello

WAIT_S = 8.0
FACTS: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 16, "block_tokens": 16, "num_blocks": 16}


def frame(message: Message, num_fds: int = 0) -> bytes:
    payload = encode(message)
    return HEADER.pack(len(payload), num_fds, 0) + payload


def connected(path: str) -> socket.socket:
    """A connection, however long the queue before it is; what is sent and read waits for 3 s."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 3, 0))
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 3, 0))
    made.connect(path)
    return made


class WorkerByHand:
    """A connection to a worker socket that says whatever an attack wants."""

    def __init__(self, path: str, hello: bool = True) -> None:
        self.socket = connected(path)
        self._link = FrameSocket(self.socket.dup())  # which makes both non-blocking: each waits by itself
        self._heard: list[Message] = []
        self.fds: list[int] = []  # that came along
        self.ended = False
        self.acknowledges = True  # each mover that is offered
        if hello:
            self.hello()

    def hello(self, versions: Versions = worker.WORKER_VERSIONS) -> Message | None:
        self.say(worker.Hello(versions=versions, client="by hand"))
        return self.next()

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
        self, name: str, memory: SealedMemory | None = None, layout: RankLayout | None = None, **more: Any
    ) -> Any:
        """Be a rank of an engine of that name. Returns the answer.

        `deliveries`: the descriptor behind the region's, in place of a socket; `answers`: what is waited
        for, at most `wait_s`.
        """
        spec = EngineSpec(
            engine_id=name, generation=more.pop("generation", "g1"), num_layers=2, num_kv_heads=2
        )
        spec = more.pop("spec", spec)
        wait_s, deliveries = more.pop("wait_s", 20.0), more.pop("deliveries", None)
        replies = more.pop("answers", (worker.Registered, worker.Refused, worker.Farewell))
        layout = layout or attention_layout(spec=spec, **FACTS)
        region = layout.regions[0]
        own = memory or SealedMemory.create(region.size_bytes, "by-hand")
        exported = worker.RegionExport(region=region.region, size_bytes=region.size_bytes)
        register = worker.Register(
            request=1,
            engine=spec,
            layout=layout,
            regions=(exported,),
            **({"incarnation": os.urandom(8).hex()} | more),
        )
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as unread:
            self.say(register, own.fd, unread.fileno() if deliveries is None else deliveries)
        if memory is None:
            own.close()
        return self.await_one(replies, wait_s)

    def close(self) -> None:
        self.socket.close()
        self._link.close()
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)


class PeerByHand:
    """A DEALER to a daemon's peer socket."""

    def __init__(self, endpoint: str, key: CurveKeyPair | None, greet: bool = True) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 100_000)
        self.socket.setsockopt(zmq.SNDTIMEO, 5_000)
        if key is not None:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(key_of(endpoint)))
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(key.public))
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
        self.socket.connect(address_of(endpoint))
        if greet:
            self.say(self.greeting())
            self.next()

    @staticmethod
    def greeting(
        request: int = 1, endpoint: str = "tcp://127.0.0.1:1", versions: Versions = PEER_VERSIONS
    ) -> PeerHello:
        return PeerHello(request=request, versions=versions, boot="by-hand", endpoint=endpoint)

    def say(self, message: Message) -> None:
        self.socket.send(encode(message))

    def next(self, wait_s: float = WAIT_S) -> Message | None:
        if not self.socket.poll(int(wait_s * 1e3)):
            return None
        return PEER_MESSAGES.decode(self.socket.recv())

    def send_request(self, message: Any, wait_s: float = WAIT_S) -> Any:
        """Say it; return the answer to that request."""
        self.say(message)
        until = time.monotonic() + wait_s
        while (left := until - time.monotonic()) > 0:
            reply = self.next(left)
            if reply is None or getattr(reply, "request", None) in (message.request, 0):
                return reply
        return None

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()


def stranger_key() -> CurveKeyPair:
    """One that nobody admits."""
    public, secret = zmq.curve_keypair()
    return CurveKeyPair(z85.decode(public).hex(), z85.decode(secret))
