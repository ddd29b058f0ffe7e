"""What has arrived of one session and is not dealt with: taken in turns, so that others have theirs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from kvxferd.link import Link, close_all
from kvxferd.wire.framing import Frame

# One turn of a session. A small message takes 20 to 100 us, so 64 are a few milliseconds; a large one (a
# layout, megabytes of block ids) takes tens and ends the turn. Then the loop's other sockets have theirs.
FRAMES_PER_TURN = 64
TURN_S = 0.005
SMALL_S = 0.001  # a turn that is shorter is not looked at more closely
# Read at a time: what is not dealt with waits here, and the rest in the kernel, where the sender pays for it.
READS_PER_TURN = 1


class Inbox:
    """The frames of one session, in order."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._frames: deque[Frame] = deque()
        self.num_taken = 0  # in the last turn
        self.took_s = 0.0  # of the processor
        self.ended = False  # the other side has closed, and all that it sent was taken

    def take_turn(self, take: Callable[[Frame], None]) -> bool:
        """Read, and hand frames to `take`; return whether some are left. Raises what either raises.

        `take` owns the descriptors of what it is given.
        """
        # The thread's clock takes 1.5 us, the other 0.1: processor time is never more than time.
        self.num_taken, began, began_cpu = 0, time.monotonic(), time.thread_time()
        try:
            return self._take_turn(take, began, began_cpu + TURN_S)
        finally:
            self.took_s = time.monotonic() - began
            if self.took_s > SMALL_S:
                self.took_s = time.thread_time() - began_cpu

    def _take_turn(self, take: Callable[[Frame], None], began: float, ends_at: float) -> bool:
        if not self._frames:
            frames = self._link.receive(READS_PER_TURN, FRAMES_PER_TURN)
            if frames is None:
                self.ended = True
                return False
            self._frames.extend(frames)
        while self._frames and self.num_taken < FRAMES_PER_TURN:
            self.num_taken += 1
            take(self._frames.popleft())
            if time.monotonic() - began >= TURN_S and time.thread_time() >= ends_at:
                break
        return bool(self._frames) or self._link.holds_frames

    def close(self) -> None:
        """Close the descriptors of frames that nobody takes."""
        while self._frames:
            close_all(self._frames.popleft().fds)
