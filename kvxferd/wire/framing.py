"""Frames on a Unix stream socket: an 8-byte header, a msgpack payload, and file descriptors.

Header, little endian: u32 payload bytes, u16 descriptors, u16 zero. A frame's descriptors are
sent with its first byte; the receiver queues them in order of arrival and each frame takes as
many as its header says.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from kvxferd.errors import Code, ProtocolError
from kvxferd.wire.limits import MAX_FDS_PER_FRAME, MAX_FRAME_BYTES

HEADER = struct.Struct("<IHH")


class Frame(NamedTuple):
    """One decoded frame. The receiver owns its descriptors."""

    payload: bytes
    fds: tuple[int, ...]


def encode_frame(payload: bytes, num_fds: int = 0) -> bytes:
    """Return header and payload as one buffer. Raises ProtocolError where a limit is exceeded."""
    return encode_header(len(payload), num_fds) + payload


def encode_header(num_bytes: int, num_fds: int) -> bytes:
    """Return the header of a payload of that many bytes. Raises ProtocolError where a limit is exceeded."""
    if num_bytes > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"cannot send a frame of {num_bytes} bytes: the limit is {MAX_FRAME_BYTES}",
            Code.FRAME_TOO_LARGE,
        )
    if num_fds > MAX_FDS_PER_FRAME:
        raise ProtocolError(f"cannot send {num_fds} descriptors in a frame: the limit is {MAX_FDS_PER_FRAME}")
    return HEADER.pack(num_bytes, num_fds, 0)


class FrameDecoder:
    """Bytes and descriptors in, frames out. After it raised, the connection must be closed.

    The caller closes the descriptors of frames that were not returned: also those of complete frames,
    where the bytes behind them in the same chunk cannot be decoded.
    """

    def __init__(self, max_payload_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_payload_bytes = max_payload_bytes  # of the frames that begin from now on
        self.max_fds = MAX_FDS_PER_FRAME
        self._buffer = bytearray()
        self._fds: deque[int] = deque()
        self.has_more_frames = False  # whole frames may be left: `feed(b"")` returns them

    @property
    def num_buffered_bytes(self) -> int:
        """The bytes of frames that were not returned yet."""
        return len(self._buffer)

    def feed(
        self, chunk: bytes | memoryview, fds: Iterable[int] = (), max_frames: int = 1 << 30
    ) -> list[Frame]:
        """Return the frames that `chunk` completes. Only copies of the chunk are kept.

        At most `max_frames` are returned: 256 KiB of the smallest are 32,768, which take 130 ms and, as
        objects, 4 MB.
        """
        self._fds.extend(fds)
        if self._buffer:
            self._buffer += chunk
        data: bytes | bytearray | memoryview = self._buffer or chunk
        frames: list[Frame] = []
        consumed = 0
        self.has_more_frames = False
        while len(data) - consumed >= HEADER.size:
            if len(frames) >= max_frames:
                self.has_more_frames = True
                break
            length, num_fds, zero = HEADER.unpack_from(data, consumed)
            self._check_header(length, num_fds, zero)
            end = consumed + HEADER.size + length
            if len(data) < end:
                break
            if len(self._fds) < num_fds:
                raise ProtocolError(
                    f"cannot take a frame that announces {num_fds} descriptors: {len(self._fds)} arrived"
                )
            payload = bytes(memoryview(data)[consumed + HEADER.size : end])
            announced = tuple(self._fds.popleft() for _ in range(num_fds)) if num_fds else ()
            frames.append(Frame(payload, announced))
            consumed = end
        if data is not chunk:
            del self._buffer[:consumed]
        elif consumed < len(chunk):
            self._buffer += memoryview(chunk)[consumed:]
        if len(self._fds) > self.max_fds and not self.has_more_frames:
            raise ProtocolError(f"cannot hold {len(self._fds)} descriptors that no frame announced")
        return frames

    def _check_header(self, length: int, num_fds: int, zero: int) -> None:
        if zero != 0:
            raise ProtocolError("cannot read a frame whose header does not end in two zero bytes")
        if length > self.max_payload_bytes:
            raise ProtocolError(
                f"cannot take a frame of {length} bytes: the limit is {self.max_payload_bytes}",
                Code.FRAME_TOO_LARGE,
            )
        if num_fds > self.max_fds:
            raise ProtocolError(
                f"cannot take {num_fds} descriptors in one frame: the limit is {self.max_fds}"
            )

    def check_complete(self) -> None:
        """Check, at the stream's end, that it ended between frames. Raises ProtocolError if it did not."""
        if self._buffer:
            raise ProtocolError(f"the connection ended inside a frame: {len(self._buffer)} bytes of it came")
