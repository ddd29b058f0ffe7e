"""A session's events and blocking calls with asyncio: two ranks on one loop, and what is cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from kvxferd.client.aio import events, in_thread
from kvxferd.client.events import Delivered, Disconnected, Event, Failed, Suspended
from kvxferd.errors import Code
from kvxferd.wire import worker
from tests.support.client_harness import Stage, delivered


async def test_events_come_as_they_are_emitted_until_the_session_is_over(stage: Stage) -> None:
    rank = await asyncio.to_thread(stage.rank)
    ticket = await asyncio.to_thread(stage.pull, rank)
    cancelled = asyncio.ensure_future(anext(events(rank)))
    await asyncio.sleep(0)  # it waits
    assert not cancelled.done()
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    stage.side.say(delivered(ticket))
    stream = events(rank)
    assert await asyncio.wait_for(anext(stream), 10) == Delivered(ticket, 3, 2, 0.5)
    stage.side.say(worker.Farewell(code=Code.BAD_VERSION, message="upgrade"))
    rest = [event async for event in stream]
    assert [type(event) for event in rest] == [Disconnected]


async def test_what_movers_still_do_as_a_session_ends_has_its_events_too(stage: Stage) -> None:
    rank = await asyncio.to_thread(stage.rank)
    ticket = await asyncio.to_thread(stage.pull, rank)
    rank.suspend()
    stage.side.say(worker.Farewell(code=Code.BAD_VERSION, message="upgrade"))
    stream = events(rank)
    assert isinstance(await asyncio.wait_for(anext(stream), 10), Disconnected)
    assert not rank.is_over
    stage.mover.die()
    rest = await asyncio.wait_for(_all_of(stream), 10)
    assert {type(event) for event in rest} == {Failed, Suspended}
    assert all(event.ticket is ticket and event.safe_to_reuse for event in rest if isinstance(event, Failed))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_bug_in_the_thread_leaves_no_task_waiting(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = await asyncio.to_thread(stage.rank)
    await asyncio.to_thread(stage.pull, rank)
    monkeypatch.setattr(rank._session, "handle", lambda *_: 1 / 0)
    stage.side.say(worker.Suspended())
    heard = await asyncio.wait_for(_all_of(events(rank)), 10)
    assert [type(event) for event in heard] == [Failed, Disconnected]


async def _all_of(stream: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in stream]


async def test_a_blocking_call_returns_what_it_returned() -> None:
    assert await in_thread(lambda: 7, lambda made: None) == 7


async def test_a_cancelled_call_is_undone_once_it_has_ended_however_often_it_is_cancelled() -> None:
    may_end, undone = threading.Event(), []

    def call() -> int:
        assert may_end.wait(10)
        return 7

    waiting = asyncio.ensure_future(in_thread(call, undone.append))
    for _ in range(2):
        await asyncio.sleep(0)
        waiting.cancel()
    await asyncio.sleep(0)
    assert not waiting.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert undone == [7]
