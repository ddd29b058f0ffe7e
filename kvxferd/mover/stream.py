"""Frames with descriptors over a non-blocking Unix stream socket. No event loop: both sides bring theirs."""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from collections.abc import Sequence

from kvxferd.errors import ProtocolError
from kvxferd.wire.framing import Frame, FrameDecoder, encode_frame
from kvxferd.wire.limits import MAX_FDS_PER_FRAME

_RECEIVE_BYTES = 256 << 10
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_FDS_PER_FRAME * array.array("i").itemsize)
# One `receive` takes this many reads at most, so that a talkative peer does not starve the caller.
_MAX_READS = 16


class FrameStream:
    """Owns the socket, and descriptors on their way in or out."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._decoder = FrameDecoder()
        self._output: deque[tuple[memoryview, tuple[int, ...]]] = deque()

    def fileno(self) -> int:
        """The socket's descriptor, -1 once closed."""
        return self._socket.fileno()

    @property
    def has_output(self) -> bool:
        """Something waits for `flush`."""
        return bool(self._output)

    def queue(self, payload: bytes, fds: Sequence[int] = ()) -> None:
        """Put a frame at the end of the output; descriptors are duplicated. Raises ProtocolError, OSError."""
        frame = encode_frame(payload, len(fds))
        copies: list[int] = []
        try:
            copies.extend(os.dup(fd) for fd in fds)
        except OSError:
            _close_all(copies)
            raise
        self._output.append((memoryview(frame), tuple(copies)))

    def flush(self) -> bool:
        """Send what the socket takes; return whether that was all. Raises OSError if the peer is gone."""
        while self._output:
            left, fds = self._output[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                sent = self._socket.sendmsg([left], rights, socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                return False
            # Descriptors go with the first byte: once anything is sent they are sent.
            _close_all(fds)
            if sent == len(left):
                self._output.popleft()
            else:
                self._output[0] = (left[sent:], ())
        return True

    def receive(self) -> tuple[list[Frame], bool]:
        """Return the frames that have arrived, and whether the peer has closed its end.

        The caller owns the frames' descriptors. Raises ProtocolError; then the stream must be closed.
        """
        frames: list[Frame] = []
        for _ in range(_MAX_READS):
            try:
                chunk, ancillary, flags, _address = self._socket.recvmsg(
                    _RECEIVE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except (BlockingIOError, InterruptedError):
                break
            except ConnectionResetError:
                return frames, True
            fds = _descriptors(ancillary)
            if flags & socket.MSG_CTRUNC:
                _close_all(fds)
                raise ProtocolError("cannot take a frame whose descriptors the kernel cut off")
            if not chunk:
                return frames, True
            frames += self._decoder.feed(chunk, fds)
        return frames, False

    def close(self) -> None:
        """Close the socket and every descriptor that is still on its way. Idempotent."""
        _close_all(self._decoder.orphans())
        for _, fds in self._output:
            _close_all(fds)
        self._output.clear()
        self._socket.close()


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return fds.tolist()


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
