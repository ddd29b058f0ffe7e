"""Who reads next: workers' users and the peers in turn, within a time for each turn of the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvxferd.fair_queue import FairQueue

# The time of all together in one turn of the loop. One turn of a session is 5 ms, or one frame: 16 sessions
# of one user, read one after the other, blocked the loop for 94 ms; 224 would block it for 1 s.
LOOP_TURN_S = 0.02
# One turn of a session or a ZMQ socket: so many messages, or this processor time. A small message takes 20 to
# 100 us; a large one (a layout, megabytes of block ids) takes tens of milliseconds and ends the turn.
MESSAGES_PER_TURN, TURN_S = 64, 0.005
# Shorter turns are not counted, because each count needs one more turn of the loop.
MIN_COUNTED_S = 0.001
PEERS = -1  # the owner of every ZMQ socket, beside the users: libzmq takes connections in turn itself

Turn = Callable[[], bool]  # reads some of what has arrived; returns whether more may be left


class Turns:
    """Who waits for a turn. Call every method on the loop's thread."""

    def __init__(self) -> None:
        self._waiting: FairQueue[int, Turn] = FairQueue()
        self._spent_s = 0.0  # in this turn of the loop
        self._is_due = False
        self._began = self._began_cpu = 0.0  # of the turn that runs

    def run_now(self, owner: int, turn: Turn) -> bool:
        """Run the turn now. False: it is queued, as others wait or this turn of the loop has no time left."""
        if self._waiting or self._spent_s >= LOOP_TURN_S:
            self.enqueue(owner, turn)
            return False
        try:
            self._run(owner, turn)
        finally:
            self._schedule_rest()
        return True

    def enqueue(self, owner: int, turn: Turn) -> None:
        """Queue the turn, behind its owner's other ones."""
        self._waiting.put(owner, turn)
        self._schedule_rest()

    def is_over(self) -> bool:
        """Whether the turn that runs has used its time."""
        # `thread_time` takes 1.5 us, `monotonic` 0.1: processor time never exceeds elapsed time.
        elapsed_s = time.monotonic() - self._began
        return elapsed_s >= TURN_S and time.thread_time() - self._began_cpu >= TURN_S

    def _run(self, owner: int, turn: Turn) -> None:
        self._began, self._began_cpu = time.monotonic(), time.thread_time()
        try:
            if turn():
                self._waiting.put(owner, turn)
        finally:
            spent_s = time.monotonic() - self._began
            if spent_s >= MIN_COUNTED_S:
                spent_s = time.thread_time() - self._began_cpu
            self._spent_s += spent_s

    def _schedule_rest(self) -> None:
        if not self._is_due and (self._waiting or self._spent_s >= MIN_COUNTED_S):
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._run_waiting)

    def _run_waiting(self) -> None:
        """Run turns that wait, at the start of a new turn of the loop."""
        self._is_due, self._spent_s = False, 0.0
        try:
            while self._waiting and self._spent_s < LOOP_TURN_S:
                self._run(*self._waiting.get())
        finally:  # an exception must not stop the others' turns
            self._schedule_rest()
