"""A TCP link that can be cut, stalled, made one-way or slow, and healed: the network between daemons."""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from contextlib import suppress
from enum import Enum

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST


class Mode(Enum):
    """What the link does at this moment."""

    OPEN = "open"
    CUT = "cut"  # connections are reset, new ones too
    STALLED = "stalled"  # nothing passes, nothing is reset
    REQUESTS_LOST = "asking-lost"  # what the connecting side sends does not pass
    REPLIES_LOST = "answers-lost"  # what the listening side sends does not pass
    SLOW = "slow"  # a few bytes at a time


class _Pair:
    """One connection: two sockets and what is on its way in each direction."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.other = {near: far, far: near}
        self.near = near
        self.pending = {near: b"", far: b""}  # by the socket that it goes to

    def close(self) -> None:
        for end in self.other:
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            end.close()


class Proxy:
    """Forwards one port to another from a thread of its own."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._mode = Mode.OPEN
        self._wanted = Mode.OPEN
        self._pairs: list[_Pair] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self._wake, self._waker = socket.socketpair()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        host, port = self._listener.getsockname()
        return f"tcp://{host}:{port}"

    def set(self, mode: Mode) -> None:
        """Change the link; takes effect within milliseconds."""
        self._wanted = mode
        self._waker.send(b"x")

    def stop(self) -> None:
        self._ending = True
        self._waker.send(b"x")
        self._thread.join(5)
        for pair in self._pairs:
            pair.close()
        for end in (self._listener, self._wake, self._waker):
            end.close()

    # --- the thread

    def _run(self) -> None:
        while not self._ending:
            if self._mode is not self._wanted:
                self._mode = self._wanted
            if self._mode is Mode.CUT:
                self._cut()
            self._turn()

    def _cut(self) -> None:
        for pair in self._pairs:
            pair.close()
        self._pairs.clear()

    def _turn(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            for pair in self._pairs:
                for end in pair.other:
                    events = self._events(pair, end)
                    if events:
                        selector.register(end, events, pair)
            ready = selector.select(0.02 if self._mode is Mode.SLOW else 0.5)
        for key, events in ready:
            if key.fileobj is self._wake:
                self._wake.recv(4096)
            elif key.fileobj is self._listener:
                self._accept()
            elif key.data in self._pairs:
                self._serve(key.data, key.fileobj, events)
        if self._mode is Mode.SLOW:
            threading.Event().wait(0.005)

    def _events(self, pair: _Pair, end: socket.socket) -> int:
        reading = selectors.EVENT_READ if self._passes(pair, end) and not pair.pending[pair.other[end]] else 0
        writing = selectors.EVENT_WRITE if pair.pending[end] else 0
        return reading | writing

    def _passes(self, pair: _Pair, source: socket.socket) -> bool:
        match self._mode:
            case Mode.STALLED:
                return False
            case Mode.REQUESTS_LOST:
                return source is not pair.near
            case Mode.REPLIES_LOST:
                return source is pair.near
        return True

    def _accept(self) -> None:
        with suppress(OSError):
            near, _ = self._listener.accept()
            try:
                if self._mode is Mode.CUT:
                    raise OSError("cut")
                far = socket.create_connection(self._target, timeout=1.0)
            except OSError:
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                near.close()
                return
            for end in (near, far):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pairs.append(_Pair(near, far))

    def _serve(self, pair: _Pair, end: socket.socket, events: int) -> None:
        most = 16 if self._mode is Mode.SLOW else 1 << 16
        try:
            if events & selectors.EVENT_READ:
                if not (got := end.recv(most)):
                    raise ConnectionError
                pair.pending[pair.other[end]] += got
            if events & selectors.EVENT_WRITE:
                sent = end.send(pair.pending[end][:most])
                pair.pending[end] = pair.pending[end][sent:]
        except BlockingIOError:
            pass
        except OSError:
            pair.close()
            self._pairs.remove(pair)
