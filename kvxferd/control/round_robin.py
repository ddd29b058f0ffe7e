"""Whose turn it is: user by user, and of each user session by session, for so long in a turn of the loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

# What all sessions together have in one turn of the loop. A session's own turn is 5 ms, or one frame: 16
# sessions of one user that were read one after the other had the loop for 94 ms; 224 would have it for 1 s.
LOOP_TURN_S = 0.02
# Less is not counted by turns of the loop: each count has the loop turn once more.
MIN_COUNTED_S = 0.001

T = TypeVar("T")


class RoundRobin(Generic[T]):
    """Sessions that wait for a turn. All methods belong to one event loop's thread."""

    def __init__(self, run_turn: Callable[[T], float]) -> None:
        """`take` is called when it is a session's turn, and returns the processor time that it took."""
        self._run_turn = run_turn
        self._queues: dict[int, deque[T]] = {}  # by user, whose turn is next first
        self._spent_s = 0.0
        self._is_due = False

    def run_now(self, session: T) -> bool:
        """Have the session take its turn, unless others wait or this turn of the loop is used up."""
        if self._queues or self._spent_s >= LOOP_TURN_S:
            return False
        self._spent_s += self._run_turn(session)
        if self._spent_s >= MIN_COUNTED_S:
            self._schedule()
        return True

    def enqueue(self, uid: int, session: T) -> None:
        """Have the session's turn come, behind those of its user who wait already."""
        self._queues.setdefault(uid, deque()).append(session)
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._run_queued)

    def _run_queued(self) -> None:
        """The loop has turned."""
        self._is_due, self._spent_s = False, 0.0
        try:
            while self._queues and self._spent_s < LOOP_TURN_S:
                self._spent_s += self._run_turn(self._dequeue())
        finally:  # one that raises keeps no other from its turn
            if self._queues or self._spent_s >= MIN_COUNTED_S:
                self._schedule()

    def _dequeue(self) -> T:
        uid, sessions = next(iter(self._queues.items()))
        del self._queues[uid]
        session = sessions.popleft()
        if sessions:
            self._queues[uid] = sessions  # behind all other users
        return session
