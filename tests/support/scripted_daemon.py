"""A daemon that says what a test has it say: a real Unix socket, real frames, real descriptors."""

from __future__ import annotations

import array
import os
import select
import socket
import subprocess
from collections import deque
from pathlib import Path
from typing import TypeVar

from kvxferd.memory.fence import FencePage
from kvxferd.wire import worker
from kvxferd.wire.codec import CLIENT_MESSAGES, encode
from kvxferd.wire.common import Message
from kvxferd.wire.framing import FrameDecoder, encode_frame

WAIT_S = 10.0
ENDPOINT = "tcp://10.0.0.1:7701"
M = TypeVar("M")


class ScriptedDaemon:
    """Listens; each `accept` is one client's connection. Stopping and starting again is a restart."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sessions: list[DaemonSide] = []
        self.start()

    def start(self) -> None:
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(os.fspath(self.path))
        self._listener.listen(16)
        self._listener.settimeout(WAIT_S)

    def accept(self) -> DaemonSide:
        side = DaemonSide(self._listener.accept()[0])
        self.sessions.append(side)
        return side

    def nobody_comes(self, for_s: float) -> bool:
        """Whether no client connects within the time."""
        return not select.select([self._listener], [], [], for_s)[0]

    def stop(self) -> None:
        """Die: every connection ends and the socket is gone."""
        self._listener.close()
        self.path.unlink(missing_ok=True)
        for side in self.sessions:
            side.close()

    def restart(self) -> None:
        self.stop()
        self.start()


class DaemonSide:
    """The daemon's end of one connection."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.settimeout(WAIT_S)
        self._decoder = FrameDecoder()
        self._frames: deque[tuple[Message, tuple[int, ...]]] = deque()
        self.num_offers = 0
        self.delivery_fd = -1  # of the registration
        self.page = FencePage.create()
        self.fds: list[int] = []  # every descriptor that arrived, closed with the connection

    def receive(self) -> tuple[Message, tuple[int, ...]]:
        """Return the next message and its descriptors. Raises ConnectionError at the end."""
        while not self._frames:
            if not self._read():
                raise ConnectionError("the client has closed the connection")
        return self._frames.popleft()

    def _read(self) -> bool:
        chunk, fds, _, _ = socket.recv_fds(self._socket, 1 << 20, 253)
        self.fds.extend(fds)
        frames = self._decoder.feed(chunk, fds)
        self._frames.extend((CLIENT_MESSAGES.decode(frame.payload), frame.fds) for frame in frames)
        return bool(chunk)

    def expect(self, kind: type[M]) -> M:
        """Return the next message, which must be of this kind."""
        message, _ = self.receive()
        assert isinstance(message, kind), message
        return message

    def is_silent(self, for_s: float = 0.1) -> bool:
        """Whether the client says nothing within the time."""
        return not self._frames and not select.select([self._socket], [], [], for_s)[0]

    def say(self, message: Message, *fds: int) -> None:
        self.write(encode_frame(encode(message), len(fds)), *fds)

    def write(self, raw: bytes, *fds: int) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sent = self._socket.sendmsg([raw], rights)
        if sent < len(raw):
            self._socket.sendall(raw[sent:])

    def close(self) -> None:
        self._socket.close()
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()
        self.page.close()

    def deliver(self, raw: bytes) -> None:
        """Write a packet into the socket for deliveries, as the rank's mover."""
        with socket.socket(fileno=os.dup(self.delivery_fd)) as deliveries:
            deliveries.send(raw)

    # --- the usual

    def greet(self, lease_s: float = 30.0) -> worker.Hello:
        hello = self.expect(worker.Hello)
        self.say(
            worker.Welcome(version=hello.versions.newest, boot_id="boot", lease_s=lease_s, max_hold_s=600.0)
        )
        return hello

    def register(self, mover: Mover, endpoint: str = ENDPOINT) -> worker.Register:
        register, fds = self.receive()
        assert isinstance(register, worker.Register), register
        self.delivery_fd = fds[-1]
        self.offer(mover)
        self.say_registered(register.request, endpoint)
        return register

    def say_registered(self, request: int, endpoint: str = ENDPOINT) -> None:
        """Reply to `Register` or `Attach`, with the fence page."""
        self.say(worker.Registered(request=request, endpoint=endpoint), self.page.fd)

    def accept_resume(self, request: int, mover: Mover) -> None:
        """Reply to `Resume`: another mover, and no other fence page."""
        self.offer(mover)
        self.say(worker.Registered(request=request, endpoint=ENDPOINT))

    def offer(self, mover: Mover) -> None:
        """Return once the client watches the mover."""
        self.num_offers += 1
        self.say(worker.MoverOffered(number=self.num_offers), mover.pidfd)
        assert self.expect(worker.MoverAcknowledged).number == self.num_offers


class Mover:
    """A real process that stands for a rank's mover; it ends with its standard input, at the latest."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self.pidfd = os.pidfd_open(self._process.pid)

    def die(self) -> None:
        """Return once the process is gone."""
        self._process.kill()
        self._process.wait(WAIT_S)

    def close(self) -> None:
        self.die()
        assert self._process.stdin is not None
        self._process.stdin.close()
        os.close(self.pidfd)
