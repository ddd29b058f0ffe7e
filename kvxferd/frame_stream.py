"""A FrameSocket on the event loop: the daemon's end of each worker, mover and forkserver."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from kvxferd.errors import ProtocolError
from kvxferd.frame_socket import FrameSocket
from kvxferd.wire.framing import Frame

# Of a mover. The largest pull sends two lists of 16 MiB, its peer's agents of 32 MiB and its plan of 4 MiB,
# all in one turn of the loop. A mover that leaves half as much again unread will not read again.
MAX_UNSENT_BYTES = 96 << 20
# A sender may be as fast as it likes. One frame takes some 15 us, and a read holds 13,000 of the smallest.
# After these many the event loop's other sockets have their turn.
MAX_FRAMES_PER_TURN = 64


class FrameStream(FrameSocket):
    """Sends what the kernel takes at once, and the rest while the other side reads.

    A receiver that leaves more than `max_unsent` bytes unread is cut off: `on_end` is called with the reason.
    """

    def __init__(
        self,
        connected: socket.socket,
        on_readable: Callable[[], object],
        on_end: Callable[[str], None],
        max_unsent: int = MAX_UNSENT_BYTES,
        read_buffer: memoryview | None = None,
    ) -> None:
        """Take ownership of the socket. Call `set_reading` for `on_readable` to be called."""
        super().__init__(connected, read_buffer)
        self.max_unsent = max_unsent
        self._on_readable = on_readable
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._is_reading = self._is_writing = self._is_read_due = self._is_ending = False

    def set_reading(self, is_reading: bool = True) -> None:
        """Call `on_readable` while something has arrived, from now on; or do not."""
        if is_reading != self._is_reading:
            self._is_reading = is_reading
            if is_reading:
                self._loop.add_reader(self.fileno(), self._read_arrived)
            else:
                self._loop.remove_reader(self.fileno())

    def read(self, handle: Callable[[Frame], None]) -> bool:
        """Call `handle` for some frames that have arrived; return whether there may be more.

        `on_readable` is called for the others. `on_end` is called at the end of the stream, with "", and with
        the reason where `handle` or a frame raises ProtocolError or OSError.
        """
        if self.fileno() < 0:
            return False
        num_frames, reason = None, ""
        try:
            num_frames = self.handle_frames(handle, MAX_FRAMES_PER_TURN)
        except (ProtocolError, OSError) as error:
            reason = str(error)
        if num_frames is None:
            self._on_end(reason)
        elif self.has_buffered_frames and not self._is_read_due:
            self._is_read_due = True
            self._loop.call_soon(self._read_again)
        return bool(num_frames)

    def send(self, payload: bytes, fds: tuple[int, ...] = ()) -> None:
        """Send a frame, and own `fds`. Raises ProtocolError for a frame beyond the limits."""
        super().send(payload, fds)
        if not self._is_writing:
            self._write()
        if self.unsent_bytes > self.max_unsent:
            self._on_end(f"more than {self.max_unsent} bytes wait for it to read")

    def end_when_flushed(self, within_s: float) -> None:
        """Have `on_end` called with "" once all is sent, at the latest after `within_s`; perhaps twice."""
        self._is_ending = True
        self._loop.call_later(within_s, self._on_end, "")
        self._write()

    def detach(self) -> None:
        """Stop reading and writing. The other side sees nothing of it."""
        self.set_reading(False)
        if self._is_writing:
            self._is_writing = False
            self._loop.remove_writer(self.fileno())

    def close(self) -> None:
        self.detach()
        super().close()

    def _read_arrived(self) -> None:
        if not self._is_read_due:  # else this turn of the loop, or the next, reads what was left
            self._on_readable()

    def _read_again(self) -> None:
        self._is_read_due = False
        self._on_readable()

    def _write(self) -> None:
        self.flush()
        if self.is_flushed == self._is_writing:
            self._is_writing = not self._is_writing
            if self._is_writing:
                self._loop.add_writer(self.fileno(), self._write)
            else:
                self._loop.remove_writer(self.fileno())
        if self.is_flushed and self._is_ending:
            self._on_end("")
