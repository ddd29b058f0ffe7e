"""The received frames of one session, handled in turns so that other sessions have theirs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from kvxferd.frame_socket import FrameSocket, close_fds
from kvxferd.wire.framing import Frame

# One turn of a session. A small message takes 20 to 100 us, so 64 are a few milliseconds; a large one (a
# layout, megabytes of block ids) takes tens and ends the turn. Then the loop's other sockets have their turn.
FRAMES_PER_TURN = 64
TURN_S = 0.005
MIN_MEASURED_S = 0.001  # the processor time of a shorter turn is not measured
# Reads in a turn: unhandled frames wait here, the rest in the kernel, where it counts against the sender.
READS_PER_TURN = 1


class SessionInbox:
    """The frames of one session, in order."""

    def __init__(self, link: FrameSocket) -> None:
        self._frame_socket = link
        self._frames: deque[Frame] = deque()
        self.num_handled = 0  # in the last turn
        self.cpu_s = 0.0  # processor time of the last turn
        self.is_eof = False  # the other side has closed, and everything it sent was handled

    def process_turn(self, handle: Callable[[Frame], None]) -> bool:
        """Read, and call `handle` for each frame; return whether frames are left. Raises what either raises.

        `handle` owns the descriptors of its frame.
        """
        # `thread_time` takes 1.5 us, `monotonic` 0.1: processor time never exceeds elapsed time.
        self.num_handled, began, began_cpu = 0, time.monotonic(), time.thread_time()
        try:
            return self._process_turn(handle, began, began_cpu + TURN_S)
        finally:
            self.cpu_s = time.monotonic() - began
            if self.cpu_s > MIN_MEASURED_S:
                self.cpu_s = time.thread_time() - began_cpu

    def _process_turn(self, handle: Callable[[Frame], None], began: float, ends_at: float) -> bool:
        if not self._frames:
            frames = self._frame_socket.receive(READS_PER_TURN, FRAMES_PER_TURN)
            if frames is None:
                self.is_eof = True
                return False
            self._frames.extend(frames)
        while self._frames and self.num_handled < FRAMES_PER_TURN:
            self.num_handled += 1
            handle(self._frames.popleft())
            if time.monotonic() - began >= TURN_S and time.thread_time() >= ends_at:
                break
        return bool(self._frames) or self._frame_socket.has_buffered_frames

    def close(self) -> None:
        """Close the descriptors of unhandled frames."""
        while self._frames:
            close_fds(self._frames.popleft().fds)
