"""Schedules sessions in turns, user by user and session by session, within a time for each loop turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from kvxferd.fair_queue import FairQueue

# The time of all sessions together in one turn of the loop. A session's own turn is 5 ms, or one frame: 16
# sessions of one user, read one after the other, blocked the loop for 94 ms; 224 would block it for 1 s.
LOOP_TURN_S = 0.02
# Shorter turns are not counted, because each count needs one more turn of the loop.
MIN_COUNTED_S = 0.001

T = TypeVar("T")


class RoundRobin(Generic[T]):
    """Sessions that wait for a turn. Call every method on the loop's thread."""

    def __init__(self, run_turn: Callable[[T], float]) -> None:
        """`run_turn` runs a session's turn and returns the processor time that it took."""
        self._run_turn = run_turn
        self._waiting: FairQueue[int, T] = FairQueue()
        self._spent_s = 0.0
        self._is_due = False

    def run_now(self, session: T) -> bool:
        """Run the session's turn now. False: others wait, or this turn of the loop has no time left."""
        if self._waiting or self._spent_s >= LOOP_TURN_S:
            return False
        self._spent_s += self._run_turn(session)
        if self._spent_s >= MIN_COUNTED_S:
            self._schedule()
        return True

    def enqueue(self, uid: int, session: T) -> None:
        """Queue the session for a turn, behind its user's other waiting sessions."""
        self._waiting.put(uid, session)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._run_queued)

    def _run_queued(self) -> None:
        """Run queued turns, at the start of a new turn of the loop."""
        self._is_due, self._spent_s = False, 0.0
        try:
            while self._waiting and self._spent_s < LOOP_TURN_S:
                self._spent_s += self._run_turn(self._waiting.get())
        finally:  # an exception must not stop the other sessions' turns
            if self._waiting or self._spent_s >= MIN_COUNTED_S:
                self._schedule()
