"""One thread for work that would block the event loop, scheduled fairly between clients."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from kvxferd.control.fair_queue import FairQueue

T = TypeVar("T")

# The thread shares the GIL with the loop, which then waits up to 5 ms for each of its turns. So it pauses as
# long as it has worked; shorter work does not count.
MIN_COUNTED_S = 0.005
MAX_PAUSE_S = 0.25
STOP_S = 2.0

_Job = tuple[Callable[[], object], Callable[[object], None]]


class FairThread:
    """Runs one job of each client in turn. Call every method on the loop's thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._jobs: FairQueue[str, _Job] = FairQueue()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def submit(self, client: str, work: Callable[[], T], on_done: Callable[[T | Exception], None]) -> None:
        """Call `work` on the thread, then `on_done` on the loop with its result or exception."""
        loop = asyncio.get_running_loop()

        def done(outcome: object) -> None:
            if not self._stopping:
                on_done(outcome)  # type: ignore[arg-type]  # what this very work returned

        def hand_over(outcome: object) -> None:
            loop.call_soon_threadsafe(done, outcome)

        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system has no thread now; the next job tries again
                loop.call_soon(done, error)
                return
            self._thread = thread
        with self._changed:
            self._jobs.put(client, (work, hand_over))
            self._changed.notify()

    def close(self) -> None:
        """End the thread; jobs that have not started are dropped."""
        with self._changed:
            self._stopping = True
            self._jobs.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def _run(self) -> None:
        while (job := self._next_job()) is not None:
            work, hand_over = job
            started = time.thread_time()
            try:
                outcome = work()
            except Exception as error:  # passed to `on_done`
                outcome = error
            try:
                hand_over(outcome)
            except RuntimeError:
                return  # the loop is closed
            del job, work, hand_over, outcome
            self._pause(time.thread_time() - started)

    def _next_job(self) -> _Job | None:
        with self._changed:
            while not self._jobs and not self._stopping:
                self._changed.wait()
            return None if self._stopping else self._jobs.get()

    def _pause(self, worked_s: float) -> None:
        if worked_s < MIN_COUNTED_S:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._stopping, min(worked_s, MAX_PAUSE_S))
