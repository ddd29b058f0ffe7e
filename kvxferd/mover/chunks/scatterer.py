"""Runs scatters beside the engine: numpy lets go of the interpreter's lock while the next chunk is read.

A scatter writes the engine's blocks. `ScatterJob.is_over` is therefore the scatter's own word, set after its
last write. A scatter that was asked to end is not over.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from kvxferd.mover.linux_process import prepare_thread

_LOG = logging.getLogger(__name__)

INLINE_S = 300e-6  # pieces that are copied in one step of the engine, without a thread

Piece = Callable[[], None] | None  # one copy; None: it was made when the piece was asked for


class ScatterJob:
    """One chunk's scatter: copies of a few ten microseconds each, made by any of several threads."""

    def __init__(self, pieces: Iterator[Piece]) -> None:
        """`pieces` is advanced by one thread at a time; what it yields is called outside of that."""
        self._pieces = pieces
        self._lock = threading.Lock()  # of all below but `_is_cancelled`, and of the iterator
        self._is_cancelled = False
        self._num_running = 0  # copies that a thread is at
        self.is_handed_out = False  # nothing is left to begin
        self.error: Exception | None = None  # set before it is over
        # Only a GPU's driver leaves these in doubt; `kvxferd.mover.chunks.device_scatter`.
        self.blocks_in_doubt = False  # a copy may still run although it is over
        self.chunk_in_doubt = False  # the network, or a copy, may still use the chunk
        self._began = float("inf")
        self.elapsed_s = 0.0  # from its first copy to its last, by however many threads
        self.is_over = False

    def cancel(self) -> None:
        """Start no further copy. It is over once `is_over`."""
        self._is_cancelled = True

    def run_piece(self) -> None:
        """Make one copy, or find that there is none to begin: another thread may be at the last one."""
        began = time.perf_counter()
        piece: Piece = None
        error: Exception | None = None
        try:
            with self._lock:
                self._num_running += 1
                piece = self._next_piece()
            if piece is not None:
                piece()
        except Exception as raised:
            _LOG.exception("chunk not scattered")
            error = raised.with_traceback(None)  # which would hold the chunk
        piece = None  # the last reference to the chunk's memory may be in there
        with self._lock:
            self._num_running -= 1
            self._began = min(self._began, began)
            self.elapsed_s = time.perf_counter() - self._began
            if error is not None:
                self.error = error
                self._end_handing_out()
            self.is_over = self.is_handed_out and not self._num_running

    def _next_piece(self) -> Piece:
        if self._is_cancelled or (piece := next(self._pieces, self)) is self:
            self._end_handing_out()
            return None
        assert not isinstance(piece, ScatterJob)
        return piece

    def _end_handing_out(self) -> None:
        self.is_handed_out = True
        self._pieces = iter(())  # as in `run_piece`


class Scatterer:
    """Runs jobs in order: in a thread, which the first job starts, or in the engine's steps without one."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, *, starts_thread: bool = True) -> None:
        self._clock = clock
        self._starts_thread = starts_thread
        self._thread: threading.Thread | None = None
        self._queue: SimpleQueue[ScatterJob | None] = SimpleQueue()  # the thread's
        self._jobs: deque[ScatterJob] = deque()  # those that may have a copy left to begin
        self._is_closing = False

    def start(self, job: ScatterJob) -> None:
        """Queue a job."""
        self._forget_handed_out()
        self._jobs.append(job)
        if self._thread is not None:
            self._queue.put(job)
        elif self._starts_thread:
            self._start_thread()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="kvxferd-scatter", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there are as many as the limits allow; the next job tries again
            return
        self._thread = thread
        for job in self._jobs:
            self._queue.put(job)

    def step(self) -> bool:
        """Do the engine's part of the work, for `INLINE_S` at most; return whether there was any."""
        if self._thread is not None:
            return False
        began, moved = self._clock(), False
        while self.help():
            moved = True
            if self._clock() >= began + INLINE_S:
                break
        return moved

    def help(self) -> bool:
        """Make one copy beside the thread, because the engine has nothing else to do.

        Return whether there was any.
        """
        self._forget_handed_out()
        if not self._jobs:
            return False
        self._jobs[0].run_piece()
        return True

    def _forget_handed_out(self) -> None:
        while self._jobs and self._jobs[0].is_handed_out:
            self._jobs.popleft()

    def close(self) -> None:
        """Return once no job runs, or ever will. Jobs that were queued are cancelled."""
        # Without a limit: while a copy runs, the memory is in use, and nobody may be told otherwise.
        self._is_closing = True
        self._jobs.clear()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        prepare_thread("kvxferd-scatter")
        while (job := self._queue.get()) is not None:
            while not job.is_handed_out:
                if self._is_closing:
                    job.cancel()
                job.run_piece()
            del job  # which may be the last reference to a chunk's memory
