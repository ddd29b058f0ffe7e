"""One thread for slow work, in which nobody's work waits for all of another's."""

from __future__ import annotations

import asyncio
import threading

from kvxferd.control.fair_thread import FairThread


async def test_each_client_in_turn():
    worker, done, begin = FairThread("test"), asyncio.Queue[object](), threading.Event()
    try:
        worker.submit("busy", lambda: begin.wait(10), done.put_nowait)
        for number in range(3):
            worker.submit("busy", lambda number=number: f"busy {number}", done.put_nowait)
        worker.submit("other", lambda: "other", done.put_nowait)
        begin.set()
        order = [await asyncio.wait_for(done.get(), 20) for _ in range(5)]
        assert order.index("other") <= 2
        assert [name for name in order if str(name).startswith("busy")] == ["busy 0", "busy 1", "busy 2"]
    finally:
        worker.close()


async def test_what_is_raised_is_handed_over_and_the_next_is_done():
    worker, done = FairThread("test"), asyncio.Queue[object]()
    try:
        worker.submit("a", lambda: 1 // 0, done.put_nowait)
        worker.submit("a", lambda: 7, done.put_nowait)
        assert isinstance(await asyncio.wait_for(done.get(), 20), ZeroDivisionError)
        assert await asyncio.wait_for(done.get(), 20) == 7
    finally:
        worker.close()
    assert not any(thread.name == "test" for thread in threading.enumerate())


async def test_where_no_thread_can_be_had_the_work_has_failed_and_the_next_asks_again(monkeypatch):
    worker, done = FairThread("test"), asyncio.Queue[object]()

    def none_left(thread):
        raise RuntimeError("can't start new thread")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none_left)
            worker.submit("a", lambda: 6, done.put_nowait)
            assert isinstance(await asyncio.wait_for(done.get(), 20), RuntimeError)
        worker.submit("a", lambda: 7, done.put_nowait)
        assert await asyncio.wait_for(done.get(), 20) == 7
    finally:
        worker.close()
