"""The thread that copies chunks into the blocks: when a scatter is over, and what it keeps."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from kvxferd.mover.chunks.scatterer import Scatterer, ScatterJob
from tests.support.pull_engine_harness import Bench, scattered


def test_a_thread_that_is_closed_runs_no_scatter() -> None:
    """`close` returns when the copy under way is done; what was queued is never begun."""
    thread = Scatterer()
    ran: list[int] = []

    def pieces(number: int) -> object:
        for _ in range(1000):
            ran.append(number)
            yield

    jobs = [ScatterJob(pieces(number)) for number in range(3)]  # type: ignore[arg-type]
    for job in jobs:
        thread.start(job)
    thread.close()
    num_ran = len(ran)
    assert all(job.is_over for job in jobs)
    assert len(ran) == num_ran


@pytest.mark.parametrize("fails", [False, True])
def test_a_scatter_is_over_once_the_copies_of_both_threads_are(fails: bool) -> None:
    """The engine makes the last copy while the thread is at the one before: the blocks are still written."""
    thread = Scatterer()
    has_begun, may_end = threading.Event(), threading.Event()

    def slow() -> None:
        has_begun.set()
        may_end.wait()

    def last() -> None:
        if fails:
            raise IndexError("outside the region")

    job = ScatterJob(iter([slow, last, last] if fails else [slow, last]))
    thread.start(job)
    has_begun.wait()
    while thread.help():
        pass
    assert job.is_handed_out, "no copy is begun after one that failed"
    assert not job.is_over
    may_end.set()
    thread.close()
    assert job.is_over
    assert isinstance(job.error, IndexError) == fails


def test_a_cancelled_scatter_keeps_nothing() -> None:
    """A chunk that is given back is unmapped, whatever the thread did last."""
    thread = Scatterer()
    chunk = np.zeros(1)
    gone = weakref.ref(chunk)

    def pieces(chunk: object) -> Iterator[None]:
        while chunk is not None:
            yield

    job = ScatterJob(pieces(chunk))
    del chunk
    thread.start(job)
    job.cancel()
    while not job.is_over:
        pass
    gc.collect()
    assert gone() is None
    thread.close()


def test_scatters_run_in_the_engines_steps_where_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    bench = Bench(chunk_bytes=64 << 10, scatterer=Scatterer())
    assert bench.pull(scattered(100)).delivered


def test_a_step_without_a_thread_is_bounded_in_time() -> None:
    now = [0.0]
    inline = Scatterer(lambda: now[0], starts_thread=False)

    def pieces() -> Iterator[None]:
        while True:
            now[0] += 1e-4
            yield

    job = ScatterJob(pieces())
    inline.start(job)
    assert inline.step()
    assert now[0] == pytest.approx(3e-4, abs=1.5e-4)
    job.cancel()
    inline.step()
    assert job.is_over
    assert not inline.step()
