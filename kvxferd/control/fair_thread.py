"""One thread for work that would block the event loop, scheduled fairly between clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kvxferd.errors import BusyError
from kvxferd.fair_queue import FairQueue

T = TypeVar("T")

# The thread shares the GIL with the loop, which then waits up to 5 ms for each of its turns. So it pauses as
# long as it has worked; shorter work does not count.
MIN_COUNTED_S = 0.005
MAX_PAUSE_S = 0.25
NO_THREAD_RETRY_S = 1.0


class FairThread:
    """Runs one job of each client in turn. Call every method on the loop's thread."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, name)
        self._jobs: FairQueue[str, tuple[Callable[[], object], Callable[[Any], None]]] = FairQueue()
        self._task: asyncio.Task[None] | None = None  # runs the jobs while there are any

    def submit(self, client: str, work: Callable[[], T], on_done: Callable[[T | Exception], None]) -> None:
        """Call `work` on the thread, then `on_done` on the loop with its result or exception."""
        self._jobs.put(client, (work, on_done))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        """Drop the jobs that have not started. One that runs ends by itself, and `on_done` is not called."""
        self._jobs.clear()
        self._executor.shutdown(wait=False)
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._jobs:
                _, (work, on_done) = self._jobs.get()
                try:
                    outcome, worked_s = await loop.run_in_executor(self._executor, _timed, work)
                except RuntimeError:  # the next job tries again
                    text = f"the system has no thread now; try again in {NO_THREAD_RETRY_S:g} s"
                    outcome, worked_s = BusyError(text, NO_THREAD_RETRY_S), 0.0
                on_done(outcome)
                if worked_s >= MIN_COUNTED_S:
                    await asyncio.sleep(min(worked_s, MAX_PAUSE_S))
        finally:
            self._task = None


def _timed(work: Callable[[], object]) -> tuple[object, float]:
    """Return the result or exception of the work, and the processor time that it took."""
    began = time.thread_time()
    try:
        outcome = work()
    except Exception as error:  # passed to `on_done`
        outcome = error
    return outcome, time.thread_time() - began
