"""Sends and receives frames with file descriptors over one connected Unix socket. Never blocks.

Both ends of the worker socket, and of the socketpair between the daemon and a mover, use it.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvxferd.errors import Code, ProtocolError, count_busy_refusal
from kvxferd.wire.framing import Frame, FrameDecoder, encode_header
from kvxferd.wire.limits import MAX_FDS_PER_FRAME

READ_BUFFER_BYTES = 256 << 10
# Up to this size, copying the payload behind the header costs less than a second system call.
MAX_COALESCED_BYTES = 16 << 10
# Small frames that wait to be sent are one buffer up to this size. As objects of their own, those for one who
# does not read cost 400 bytes more each, and the garbage collector 40 ms.
MAX_CHUNK_BYTES = 64 << 10
# The objects of one chunk that waits to be sent.
UNSENT_CHUNK_BYTES = 416
# Stands in a frame for a descriptor that this process had no room for. Closing it does nothing.
LOST_FD = -1
# Reads in one `receive` at most, so that a busy sender does not starve the caller.
MAX_READS = 16
# The enumeration's members in arithmetic cost a call of Python's, a microsecond.
_CUT_OFF, _NO_SIGNAL = int(socket.MSG_CTRUNC), int(socket.MSG_NOSIGNAL)
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_FDS_PER_FRAME * array.array("i").itemsize)


@dataclass(slots=True)
class _UnsentChunk:
    payload: bytes | bytearray  # a bytearray: small frames, and more may follow
    fds: tuple[int, ...]  # sent with the first byte
    num_sent: int = 0


def new_read_buffer() -> memoryview:
    """Return a buffer for `FrameSocket` to read into."""
    return memoryview(bytearray(READ_BUFFER_BYTES))


class FrameSocket:
    """Sends and receives frames. After any method has raised, only `close` may be called."""

    def __init__(self, connected: socket.socket, read_buffer: memoryview | None = None) -> None:
        """Take ownership of a connected stream socket, whose file status flags no other process shares.

        `read_buffer` is empty between two calls, so the frame sockets of one thread may share it.
        """
        connected.setblocking(False)
        self._socket = connected
        self._decoder = FrameDecoder()
        self._read_buffer = (
            new_read_buffer() if read_buffer is None else read_buffer
        )  # allocating one for each read costs more than the read
        self._unsent: deque[_UnsentChunk] = deque()
        self._unclaimed_fds: set[int] = set()  # received, and not yet part of a returned frame
        self._accepts_lost_fds = False
        self._is_write_shut = False
        self._is_eof = False
        self._num_unsent_bytes = 0

    def fileno(self) -> int:
        """Return the socket's descriptor, for a selector; -1 once closed."""
        return self._socket.fileno()

    @property
    def is_flushed(self) -> bool:
        """Whether the kernel has everything that was given to `send`."""
        return not self._unsent

    @property
    def unsent_bytes(self) -> int:
        """The memory of what was given to `send` and not yet to the kernel."""
        return self._num_unsent_bytes + UNSENT_CHUNK_BYTES * len(self._unsent)

    def limit_frames(self, max_bytes: int, max_fds: int) -> None:
        """Refuse larger frames from now on."""
        self._decoder.max_payload_bytes, self._decoder.max_fds = max_bytes, max_fds

    def accept_lost_fds(self) -> None:
        """Accept a frame whose descriptor was lost because this process has too many open: it has LOST_FD.

        For two processes that trust each other and send at most one descriptor with a frame.
        """
        self._accepts_lost_fds = True

    @property
    def buffered(self) -> tuple[int, int]:
        """Return how many bytes of incomplete or unreturned frames are kept, and how many descriptors."""
        return self._decoder.num_buffered_bytes, len(self._unclaimed_fds)

    def send(self, payload: bytes, fds: tuple[int, ...] = ()) -> None:
        """Queue a frame. The frame socket owns `fds` from now on, and closes them once they are sent.

        Raises ProtocolError for a frame beyond the limits; then `fds` are closed too.
        """
        if self._is_write_shut:
            close_fds(fds)
            return
        try:
            header = encode_header(len(payload), len(fds))
        except ProtocolError:
            close_fds(fds)
            raise
        self._num_unsent_bytes += len(header) + len(payload)
        if len(payload) >= MAX_COALESCED_BYTES:
            self._unsent += (_UnsentChunk(header, fds), _UnsentChunk(payload, ()))
        elif fds or not self._unsent:
            self._unsent.append(_UnsentChunk(header + payload, fds))
        else:
            last = self._unsent[-1].payload
            if not isinstance(last, bytearray) or len(last) >= MAX_CHUNK_BYTES:
                last = bytearray()
                self._unsent.append(_UnsentChunk(last, ()))
            last += header
            last += payload

    def flush(self) -> None:
        """Write what the kernel takes without waiting. `receive` reports a socket that has ended."""
        while self._unsent:
            first = self._unsent[0]
            try:
                rest = memoryview(first.payload)[first.num_sent :] if first.num_sent else first.payload
                if first.fds:
                    sent = self._socket.sendmsg([rest], _scm_rights(first.fds), _NO_SIGNAL)
                else:
                    sent = self._socket.send(rest, _NO_SIGNAL)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:
                    return  # the kernel's limit of descriptors in flight: the receiver must take some first
                # Frames that the other side sent before it closed are still to be read, then the end.
                self.shutdown_write()
                return
            if first.fds:
                close_fds(first.fds)
                first.fds = ()
            first.num_sent += sent
            self._num_unsent_bytes -= sent
            if first.num_sent == len(first.payload):
                self._unsent.popleft()

    def shutdown_write(self) -> None:
        """Send nothing more, and drop what is queued. The other side reads the end and may still send."""
        self._is_write_shut = True
        self._drop_unsent()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def discard_received(self) -> bool:
        """Discard what has arrived; return whether the end was reached."""
        for _ in range(MAX_READS):
            try:
                chunk, ancillary, _, _ = self._socket.recvmsg(
                    READ_BUFFER_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except (BlockingIOError, InterruptedError):
                return False
            except OSError:
                return True
            close_fds(_fds_in(ancillary))
            if not chunk:
                return True
        return False

    @property
    def has_buffered_frames(self) -> bool:
        """Whether frames may be left that were read but not returned; polling does not show them."""
        return self._decoder.has_more_frames

    def receive(self, max_reads: int = MAX_READS, max_frames: int = 1 << 30) -> list[Frame] | None:
        """Return the frames that have arrived; None at the end. Raises ProtocolError.

        The caller owns the frames' descriptors. Frames beyond `max_frames` are returned first by the next
        call.
        """
        frames: list[Frame] = []
        if self._decoder.has_more_frames:
            frames = self._decoder.feed(b"", (), max_frames)
        for _ in range(max_reads):
            if self._is_eof or len(frames) >= max_frames:
                break
            if not self._read_once(frames, max_frames - len(frames)):
                break
        if self._is_eof and not frames:
            self._decoder.check_complete()
            return None
        if self._unclaimed_fds:
            for frame in frames:
                self._unclaimed_fds.difference_update(frame.fds)
        return frames

    def handle_frames(
        self,
        handle: Callable[[Frame], None],
        max_frames: int = 1 << 30,
        is_over: Callable[[], bool] = lambda: False,
    ) -> int | None:
        """Read once, and call `handle` for one frame after the other, until `is_over`; None at the end.

        Return how many there were; `has_buffered_frames`: there are others, of which bytes are kept here and
        the rest in the kernel, where it counts against the sender. `handle` owns the descriptors of its
        frame. Raises ProtocolError, and what `handle` raises.
        """
        num_handled = 0
        while True:
            frames = self.receive(max_reads=1, max_frames=1)
            if frames is None:
                return None
            for frame in frames:
                handle(frame)
            num_handled += len(frames)
            if not self.has_buffered_frames or num_handled >= max_frames or is_over():
                return num_handled

    def _read_once(self, frames: list[Frame], max_frames: int) -> bool:
        """Add the frames that one read completes; return whether there may be more to read."""
        try:
            num_bytes, ancillary, flags, _ = self._socket.recvmsg_into(
                [self._read_buffer], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            self._is_eof = True
            return False
        fds = _fds_in(ancillary) if ancillary else []
        self._unclaimed_fds.update(fds)
        if flags & _CUT_OFF and self._accepts_lost_fds and not fds:
            fds = [LOST_FD]
        elif flags & _CUT_OFF:
            count_busy_refusal("open_files")
            raise ProtocolError(
                "cannot take a frame whose descriptors were cut off: this process has too many open",
                Code.BUSY,
            )
        if not num_bytes:
            self._is_eof = True
            return False
        frames += self._decoder.feed(self._read_buffer[:num_bytes], fds, max_frames)
        # A short read took all there was, unless the kernel stopped behind descriptors.
        return num_bytes == len(self._read_buffer) or bool(fds)

    def close(self) -> None:
        """Close the socket and every descriptor that was not returned. Idempotent; `send` does nothing then.

        The other side reads the end even if a forked process holds a copy of the socket.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._is_write_shut = True
        self._drop_unsent()
        close_fds(self._unclaimed_fds)
        self._unclaimed_fds.clear()

    def _drop_unsent(self) -> None:
        for unsent in self._unsent:
            close_fds(unsent.fds)
        self._unsent.clear()
        self._num_unsent_bytes = 0


def _scm_rights(fds: tuple[int, ...]) -> list[tuple[int, int, array.array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]


def _fds_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return fds.tolist()


def dup_fds(fds: Iterable[int]) -> tuple[int, ...]:
    """Return copies of descriptors, for `FrameSocket.send` to own. Raises OSError, and then keeps no copy."""
    copies: list[int] = []
    try:
        for fd in fds:
            copies.append(os.dup(fd))
    except OSError:
        close_fds(copies)
        raise
    return tuple(copies)


def close_fds(fds: Iterable[int]) -> None:
    """Close descriptors; one that is already closed does not keep the others open."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
