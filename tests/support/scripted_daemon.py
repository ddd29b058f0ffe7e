"""A daemon that says what a test has it say: a real Unix socket, real frames, real descriptors."""

from __future__ import annotations

import array
import os
import select
import socket
import subprocess
import time
from collections import deque
from pathlib import Path
from typing import TypeVar

from kvxferd.ids import Generation
from kvxferd.memory.fence import UnmappedFencePage
from kvxferd.wire import worker
from kvxferd.wire.codec import CLIENT_MESSAGES, encode
from kvxferd.wire.common import Message
from kvxferd.wire.framing import Frame, FrameDecoder, encode_frame
from kvxferd.wire.limits import FENCE_WORD_BYTES
from tests.support import schema_0_1

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


class DaemonSide:
    """The daemon's end of one connection."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.settimeout(WAIT_S)
        self._decoder = FrameDecoder()
        self._frames: deque[tuple[Message, tuple[int, ...]]] = deque()
        self.version = 1
        self.num_offers = 0
        self.page: UnmappedFencePage | None = None  # that this side made
        self.fds: list[int] = []  # every descriptor that arrived, closed with the connection

    def receive(self) -> tuple[Message, tuple[int, ...]]:
        """Return the next message and its descriptors. Raises ConnectionError at the end."""
        while not self._frames:
            if not self._read():
                raise ConnectionError("the client has closed the connection")
        return self._frames.popleft()

    def _read(self) -> bool:
        chunk, frames = self._read_frames()
        for frame in frames:
            if self.version == 1:  # a client may send it nothing that 0.1 does not know
                schema_0_1.CLIENT.decode(frame.payload)
        self._frames.extend((CLIENT_MESSAGES.decode(frame.payload), frame.fds) for frame in frames)
        return bool(chunk)

    def frames_there(self) -> list[Frame]:
        """Return the frames that the next chunk completes."""
        return self._read_frames()[1]

    def _read_frames(self) -> tuple[bytes, list[Frame]]:
        chunk, fds, _, _ = socket.recv_fds(self._socket, 1 << 20, 253)
        self.fds.extend(fds)
        return chunk, self._decoder.feed(chunk, fds)

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
        if self.page is not None:
            self.page.close()

    def word(self, slot: int) -> bytes:
        """What the session's fence page holds there now; in version 1 the page came with its Hello."""
        if self.page is not None:
            return self.page.read(slot)
        return self.own_word(slot)

    def own_word(self, slot: int) -> bytes:
        """What the page holds that came with the client's Hello."""
        return os.pread(self.fds[0], FENCE_WORD_BYTES, slot * FENCE_WORD_BYTES)

    def overwrite(self, slot: int) -> None:
        """Release a transfer as a daemon does: its word goes first."""
        if self.page is not None:
            self.page.overwrite(slot)
            return
        os.pwrite(self.fds[0], bytes(FENCE_WORD_BYTES), slot * FENCE_WORD_BYTES)

    def notice(self, raw: bytes) -> None:
        """Write a packet into the client's notices, as its mover; they came with its Hello."""
        with socket.socket(fileno=os.dup(self.fds[1])) as notices:
            notices.send(raw)

    # --- the usual

    def greet(self, lease_s: float = 30.0, version: int = 1) -> worker.Hello:
        hello = self.expect(worker.Hello)
        self.version = version
        self.say(worker.Welcome(version=version, boot_id="boot", lease_s=lease_s))
        return hello

    def register(self, mover: Mover, endpoint: str = ENDPOINT) -> worker.Register:
        register = self.expect(worker.Register)
        if self.version >= worker.FIRST_WITH_MOVER_OFFERS:
            self.offer(mover)
            self.say_registered(register.request, endpoint)
            return register
        self.say(worker.Registered(request=register.request, endpoint=endpoint), mover.pidfd)
        return register

    def say_registered(self, request: int, endpoint: str = ENDPOINT, generation: str = "") -> None:
        """Answer `register` or `attach`: in version 2, with the fence page that is made here."""
        fds = ()
        if self.version >= worker.FIRST_WITH_FENCE_PAGES:
            self.page = self.page or UnmappedFencePage.create()
            fds = (self.page.fd,)
        named = Generation(generation)
        self.say(worker.Registered(request=request, endpoint=endpoint, generation=named), *fds)

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


def until(holds, what: str, deadline_s: float = WAIT_S) -> None:
    """Return once `holds()` is true. Only for what has no descriptor to wait for."""
    deadline = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < deadline, f"not in time: {what}"
        select.select([], [], [], 0.002)
