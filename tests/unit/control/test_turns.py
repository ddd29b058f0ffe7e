"""One queue serves threads and turns of the loop: the order and the fairness are tested here."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.control.fair_thread import FairThread
from kvxferd.control.turns import LOOP_TURN_S, PEERS, TURN_S, Turns
from kvxferd.errors import BusyError
from kvxferd.fair_queue import FairQueue

USERS = "abc"


@given(st.lists(st.sampled_from(USERS), max_size=40))
def test_users_take_turns_and_each_users_items_stay_in_order(users: list[str]) -> None:
    queue: FairQueue[str, int] = FairQueue()
    left: dict[str, list[int]] = {}
    for number, user in enumerate(users):
        queue.put(user, number)
        left.setdefault(user, []).append(number)
    since_turn = dict.fromkeys(left, 0)
    while queue:
        user, number = queue.get()
        assert number == left[user].pop(0)
        since_turn[user] = 0
        for other in (o for o in left if o != user and left[o]):
            since_turn[other] += 1
            assert since_turn[other] < len(left)
    assert not any(left.values())
    with pytest.raises(KeyError):
        queue.get()


# --- one thread for slow work, in which nobody's work waits for all of another's


Jobs = tuple[FairThread, asyncio.Queue[object]]


@pytest.fixture
async def jobs() -> AsyncIterator[Jobs]:
    """The thread, and what its jobs have come to."""
    worker = FairThread("test")
    yield worker, asyncio.Queue()
    worker.close()


async def next_of(done: asyncio.Queue[object]) -> object:
    return await asyncio.wait_for(done.get(), 20)


async def test_each_client_in_turn(jobs: Jobs) -> None:
    (worker, done), begin = jobs, threading.Event()
    worker.submit("busy", lambda: begin.wait(10), done.put_nowait)
    for number in range(3):
        worker.submit("busy", lambda number=number: f"busy {number}", done.put_nowait)
    worker.submit("other", lambda: "other", done.put_nowait)
    begin.set()
    assert [await next_of(done) for _ in range(5)] == [True, "other", "busy 0", "busy 1", "busy 2"]


async def test_what_is_raised_is_handed_over_and_the_next_is_done(jobs: Jobs, no_thread_left) -> None:
    worker, done = jobs
    with no_thread_left():
        worker.submit("a", lambda: 6, done.put_nowait)
        assert isinstance(await next_of(done), BusyError)
    worker.submit("a", lambda: 1 // 0, done.put_nowait)
    worker.submit("a", lambda: 7, done.put_nowait)
    assert isinstance(await next_of(done), ZeroDivisionError)
    assert await next_of(done) == 7


async def test_a_close_waits_for_no_job_and_drops_the_others(jobs: Jobs) -> None:
    (worker, done), begun, go_on = jobs, threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait(20)

    worker.submit("a", work, done.put_nowait)
    worker.submit("a", lambda: "second", done.put_nowait)
    assert await asyncio.to_thread(begun.wait, 20)
    worker.close()
    go_on.set()
    for thread in threading.enumerate():
        if thread.name.startswith("test"):
            await asyncio.to_thread(thread.join, 20)
            assert not thread.is_alive()
    await asyncio.sleep(0)  # a turn of the loop, in which an outcome would be handed over
    assert done.empty()


async def test_the_thread_rests_as_long_as_it_has_worked(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, done = jobs
    worked = itertools.cycle((0.0, 0.1))
    monkeypatch.setattr("kvxferd.control.fair_thread.time.thread_time", lambda: next(worked))
    for client in "ab":
        worker.submit(client, time.monotonic, done.put_nowait)
    first, second = [await next_of(done) for _ in "ab"]
    assert second - first >= 0.1


# --- sessions and peers share a turn of the loop: none of a user's many keeps another user's from being read


FIRST, SECOND = 1000, 2000


class Recorded:
    """Turns that record who had one, each of which takes a quarter of what all have in a turn of the loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, turn_s: float = LOOP_TURN_S / 4) -> None:
        self.taken: list[object] = []
        self.turns = Turns()
        self.now = 0.0
        self._turn_s = turn_s
        for clock in ("monotonic", "thread_time"):
            monkeypatch.setattr(f"kvxferd.control.turns.time.{clock}", lambda: self.now)

    def turn(self, name: object, num_turns: int = 1) -> Callable[[], bool]:
        left = iter(range(num_turns - 1, -1, -1))

        def run() -> bool:
            self.taken.append(name)
            self.now += self._turn_s
            return next(left) > 0

        return run


async def test_users_take_turns_and_not_their_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Recorded(monkeypatch, turn_s=0.0)
    for number in range(100):
        at.turns.enqueue(FIRST, at.turn(f"first-{number}"))
    at.turns.enqueue(SECOND, at.turn("second", num_turns=2))
    at.turns.enqueue(PEERS, at.turn("peers"))
    await asyncio.sleep(0)
    assert at.taken[:5] == ["first-0", "second", "peers", "first-1", "second"]
    assert len(at.taken) == 103


async def test_a_turn_of_the_loop_is_used_up_by_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Recorded(monkeypatch)
    for number in range(10):
        at.turns.enqueue(FIRST if number % 2 else PEERS, at.turn(number))
    for expected in (4, 8, 10):
        await asyncio.sleep(0)
        assert len(at.taken) == expected


async def test_who_is_read_at_once_uses_the_turn_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Recorded(monkeypatch)
    came = [at.turns.run_now(FIRST, at.turn(number)) for number in range(6)]
    assert came == [True] * 4 + [False] * 2
    assert at.taken == [0, 1, 2, 3]
    await asyncio.sleep(0)
    assert at.taken == [0, 1, 2, 3, 4, 5]
    assert at.turns.run_now(FIRST, at.turn(6))


async def test_one_turn_is_over_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    at, seen = Recorded(monkeypatch), list[bool]()

    def long_turn() -> bool:
        for elapsed_s in (TURN_S / 2, TURN_S):
            at.now += elapsed_s
            seen.append(at.turns.is_over())
        return False

    at.turns.run_now(FIRST, long_turn)
    at.turns.run_now(FIRST, long_turn)
    assert seen == [False, True] * 2


async def test_one_that_raises_keeps_no_other_from_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Recorded(monkeypatch, turn_s=0.0)

    def broken() -> bool:
        raise RuntimeError

    loop = asyncio.get_running_loop()
    raised: list[object] = []
    loop.set_exception_handler(lambda loop, context: raised.append(context["exception"]))
    at.turns.enqueue(FIRST, at.turn(0))
    at.turns.enqueue(FIRST, broken)
    at.turns.enqueue(FIRST, at.turn(2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert at.taken == [0, 2]
    assert len(raised) == 1
