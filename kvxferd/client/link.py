"""One connected Unix socket as frames with descriptors. Never blocks."""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from kvxferd.errors import ProtocolError
from kvxferd.wire.framing import Frame, FrameDecoder, encode_frame
from kvxferd.wire.limits import MAX_FDS_PER_FRAME

RECEIVE_BYTES = 256 << 10
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_FDS_PER_FRAME * array.array("i").itemsize)


@dataclass(slots=True)
class _Unsent:
    view: memoryview
    fds: tuple[int, ...]  # go with the first byte


class Link:
    """Frames out, frames in. After anything raised, only `close` is left."""

    def __init__(self, path: Path) -> None:
        """Connect. Raises OSError; BlockingIOError when the daemon's backlog is full."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.connect(os.fspath(path))
        except BaseException:
            self._socket.close()
            raise
        self._decoder = FrameDecoder()
        self._unsent: deque[_Unsent] = deque()
        self._received: set[int] = set()  # descriptors that no frame has handed on yet
        self._broken = False

    def fileno(self) -> int:
        """Return the socket's descriptor, for a selector."""
        return self._socket.fileno()

    @property
    def idle(self) -> bool:
        """Whether everything given to `send` is with the kernel."""
        return not self._unsent

    def send(self, payload: bytes, fds: tuple[int, ...] = ()) -> None:
        """Queue a frame. Its descriptors belong to the link from here on, and are closed once sent."""
        if self._broken:
            close_all(fds)
        else:
            self._unsent.append(_Unsent(memoryview(encode_frame(payload, len(fds))), fds))

    def flush(self) -> None:
        """Hand the kernel what it takes. A socket that takes no more is found out by `receive`."""
        while self._unsent:
            first = self._unsent[0]
            try:
                sent = self._socket.sendmsg([first.view], _rights(first.fds), socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                # What the daemon said before is still to be read, and then the end.
                self._broken = True
                self._drop_unsent()
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                return
            close_all(first.fds)
            first.fds = ()
            first.view = first.view[sent:]
            if not first.view:
                self._unsent.popleft()

    def receive(self) -> list[Frame] | None:
        """Return the frames that have arrived, None at the end. Raises ProtocolError.

        Whoever takes the frames owns their descriptors.
        """
        try:
            chunk, ancillary, flags, _ = self._socket.recvmsg(
                RECEIVE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            return None
        fds = _descriptors(ancillary)
        self._received.update(fds)
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError("cannot take a frame whose descriptors were cut off: too many are open here")
        if not chunk:
            return None
        frames = self._decoder.feed(chunk, fds)
        for frame in frames:
            self._received.difference_update(frame.fds)
        return frames

    def close(self) -> None:
        """Close the socket, and every descriptor that arrived and was not handed on."""
        self._socket.close()
        self._drop_unsent()
        close_all(self._received)
        self._received.clear()

    def _drop_unsent(self) -> None:
        for unsent in self._unsent:
            close_all(unsent.fds)
        self._unsent.clear()


def _rights(fds: tuple[int, ...]) -> list[tuple[int, int, array.array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return fds.tolist()


def close_all(fds: set[int] | tuple[int, ...] | list[int]) -> None:
    """Close descriptors; one that is gone already does not keep the others open."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
