"""The worker socket and the movers' sockets: frames with descriptors over one connection.

Promises:

* Frames arrive whole, in the order sent, each once and with its own descriptors.
* Frames that nobody reads wait; the sender never does.
* When one end closes or dies, the other reads all frames that were sent before, then the end.
* Half a frame is never returned: the end behind it is an error.
* What is sent to an end that is gone is dropped without an error, and its descriptors are closed.
* A reader without room for a frame's descriptors gets an error; one that accepts losses gets the frame.
"""

from __future__ import annotations

from collections import deque

from kvxferd.errors import ProtocolError
from kvxferd.frame_socket import LOST_FD
from kvxferd.wire.framing import Frame
from tests.property.simulation.shells.descriptors import DescriptorTable


class StreamEnd:
    """One end of a connection, with the descriptors of its process."""

    def __init__(self, table: DescriptorTable) -> None:
        self.table = table
        self.accepts_lost_fds = False
        self._other: StreamEnd | None = None
        self._arrived: deque[Frame | None] = deque()  # None: half a frame
        self._is_closed = False

    def connect(self, other: StreamEnd) -> None:
        """Connect both ends."""
        self._other, other._other = other, self

    def send(self, payload: bytes, fds: tuple[int, ...] = ()) -> None:
        """Send a frame. It owns the descriptors of its own process's table."""
        other = self._other
        if other is not None and not other._is_closed and not self._is_closed:
            other._arrived.append(Frame(payload, fds))
        self.table.close_all(fds)

    def send_half(self) -> None:
        """Die while a frame is sent."""
        if self._other is not None:
            self._other._arrived.append(None)
        self.close()

    def receive(self) -> list[Frame] | None:
        """Return the frames that have arrived; None at the end. Raises ProtocolError."""
        frames: list[Frame] = []
        while self._arrived:
            frame = self._arrived[0]
            if frame is None:
                if frames:
                    return frames
                raise ProtocolError("cannot read on: the connection ended inside a frame")
            frames.append(Frame(frame.payload, tuple(self._install(frame))))
            self._arrived.popleft()
        is_over = self._is_closed or self._other is None or self._other._is_closed
        return None if is_over and not frames else frames

    def _install(self, frame: Frame) -> list[int]:
        try:
            return [self.table.open() for _ in frame.fds]
        except OSError:
            if self.accepts_lost_fds:
                return [LOST_FD]
            raise ProtocolError("cannot take a frame whose descriptors were cut off") from None

    def close(self) -> None:
        """Close this end, or die. Idempotent."""
        self._is_closed = True
