"""A session's events awaited with asyncio, against a daemon that says what a test has it say."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from kvxferd.client import Client, Delivered, Disconnected, Event, PublishRefused, RankHandle, aio, connect
from kvxferd.client.aio import AsyncPull, Awaiter, PublishRefusedError, PullFailed, in_thread
from kvxferd.errors import Code, KvxferdError
from kvxferd.wire import worker
from tests.support.client_harness import LAYOUT, REF, REGION, SPEC, Stage, blocks
from tests.support.scripted_daemon import WAIT_S

DELIVERED = {"bytes": 1, "runs": 1, "wire_s": 0.1}
FAILED = {"code": Code.CANCELLED, "message": "cannot pull"}


async def soon(awaited: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(awaited, WAIT_S)


async def aside(call: Callable[..., Any], *args: Any) -> Any:
    """Make a blocking call, of the daemon's mostly, while the loop runs."""
    return await soon(asyncio.to_thread(call, *args))


@pytest.fixture
async def rank(stage: Stage) -> RankHandle:
    return await asyncio.to_thread(stage.rank)


@pytest.fixture
async def awaiter(rank: RankHandle) -> AsyncIterator[Awaiter]:
    async with Awaiter(rank) as awaiter:
        yield awaiter


async def pulled(stage: Stage, rank: RankHandle, awaiter: Awaiter) -> tuple[AsyncPull, worker.PullRequest]:
    pull = awaiter.pull(rank.pull(REF, blocks(), num_tokens=48, deadline_s=30.0))
    return pull, await aside(stage.side.expect, worker.PullRequest)


async def begun(awaited: Awaitable[Any]) -> asyncio.Task[Any]:
    """Return a task that waits already."""

    async def wait() -> Any:
        return await awaited

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    return task


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def collect(awaiter: Awaiter, seen: asyncio.Queue[Event]) -> None:
    async for event in awaiter.events():
        seen.put_nowait(event)


class TestInThread:
    async def test_from_connect_to_delivered(self, stage: Stage) -> None:
        async def engine() -> Delivered:
            client = await in_thread(lambda: connect(stage.daemon.path, timeout_s=WAIT_S), Client.close)
            rank = await in_thread(
                lambda: client.register(SPEC, LAYOUT, {REGION: stage.memory}, WAIT_S), RankHandle.close
            )
            async with Awaiter(rank) as events:
                return await events.pull(rank.pull(REF, blocks(), num_tokens=48, deadline_s=30.0))

        running = asyncio.create_task(engine())
        side = stage.side = await aside(stage.daemon.accept)
        await aside(side.greet)
        await aside(side.register, stage.new_mover())
        requested = await aside(side.expect, worker.PullRequest)
        side.say(worker.TicketDelivered(ticket=requested.ticket, bytes=7, runs=1, wire_s=0.1))
        assert (await soon(running)).bytes == 7

    async def test_a_connect_that_is_cancelled_leaves_nothing(self, stage: Stage) -> None:
        connecting = await begun(
            in_thread(lambda: connect(stage.daemon.path, timeout_s=WAIT_S), Client.close)
        )
        side = await aside(stage.daemon.accept)
        connecting.cancel()
        await asyncio.sleep(0)
        connecting.cancel()  # again, while the call goes on
        await aside(side.greet)
        with pytest.raises(asyncio.CancelledError):
            await soon(connecting)
        with suppress(ConnectionError):  # the connection is closed
            while True:
                await aside(side.receive)

    async def test_a_call_that_is_cancelled_and_fails(self) -> None:
        begins, ends, undone = threading.Event(), threading.Event(), []

        def fail() -> None:
            begins.set()
            assert ends.wait(WAIT_S)
            raise KvxferdError("no daemon", Code.DAEMON_LOST)

        task = await begun(in_thread(fail, undone.append))
        assert await aside(begins.wait, WAIT_S)
        task.cancel()
        ends.set()
        with pytest.raises(asyncio.CancelledError):
            await soon(task)
        assert undone == []


class TestReleased:
    async def test_the_end_may_come_before_anything_waits_for_it(
        self, stage: Stage, rank: RankHandle, awaiter: Awaiter
    ) -> None:
        seen: asyncio.Queue[Event] = asyncio.Queue()
        watching = await begun(collect(awaiter, seen))
        rank.publish("t", blocks(), num_tokens=48)
        await aside(stage.side.expect, worker.Publish)
        stage.side.say(worker.Released(transfer_id="t", why=Code.COMPLETED))
        assert (await soon(seen.get())).transfer_id == "t"
        assert (await soon(awaiter.released("t"))).why is Code.COMPLETED
        assert (await soon(awaiter.released("t"))).why is Code.COMPLETED
        await awaiter.close()
        await soon(watching)
        assert [event async for event in awaiter.events()] == []

    async def test_a_refusal_is_raised_and_the_id_published_again(
        self, stage: Stage, rank: RankHandle, awaiter: Awaiter
    ) -> None:
        rank.publish("t", blocks(), num_tokens=48)
        ending = await begun(awaiter.released("t"))
        await aside(stage.side.expect, worker.Publish)
        refused = worker.PublishRefused(transfer_id="t", code=Code.BUSY, message="full", retry_after_s=2.0)
        stage.side.say(refused)
        with pytest.raises(PublishRefusedError, match="full") as raised:
            await soon(ending)
        assert (raised.value.code, raised.value.retry_after_s) == (Code.BUSY, 2.0)
        rank.publish("t", blocks(), num_tokens=48)
        ending = await begun(awaiter.released("t"))
        await aside(stage.side.expect, worker.Publish)
        stage.side.say(worker.Released(transfer_id="t", why=Code.COMPLETED))
        assert (await soon(ending)).why is Code.COMPLETED

    async def test_a_refusal_that_nobody_awaited_is_not_the_next_ones(
        self, stage: Stage, rank: RankHandle, awaiter: Awaiter
    ) -> None:
        seen: asyncio.Queue[Event] = asyncio.Queue()
        watching = await begun(collect(awaiter, seen))
        for message in (
            worker.PublishRefused(transfer_id="t", code=Code.BUSY, message="full"),
            worker.Released(transfer_id="t", why=Code.COMPLETED),
        ):
            rank.publish("t", blocks(), num_tokens=48)
            await aside(stage.side.expect, worker.Publish)
            stage.side.say(message)
            event = await soon(seen.get())
        assert not isinstance(event, PublishRefused)
        assert (await soon(awaiter.released("t"))).why is Code.COMPLETED
        await awaiter.close()
        await soon(watching)

    async def test_of_many_those_that_ended_first_are_forgotten(
        self, stage: Stage, rank: RankHandle, awaiter: Awaiter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One that is live for long keeps none of the others."""
        monkeypatch.setattr(aio, "MAX_REMEMBERED", 3)
        rank.publish("a", blocks(), num_tokens=48)
        live = await begun(awaiter.released("a"))
        for name in "bcde":
            rank.publish(name, blocks(), num_tokens=48)
            stage.side.say(worker.Released(transfer_id=name, why=Code.COMPLETED))
            await soon(awaiter.released(name))
        forgotten = await begun(awaiter.released("b"))
        assert (await soon(awaiter.released("e"))).why is Code.COMPLETED
        stage.side.say(worker.Released(transfer_id="a", why=Code.LEASE_EXPIRED))
        assert (await soon(live)).why is Code.LEASE_EXPIRED
        assert not forgotten.done()
        await awaiter.close()
        with pytest.raises(KvxferdError, match="closed"):
            await soon(forgotten)
        with pytest.raises(KvxferdError, match="closed"):
            await soon(awaiter.released("never"))

    async def test_a_session_that_ends_by_itself(
        self, stage: Stage, rank: RankHandle, awaiter: Awaiter
    ) -> None:
        seen: asyncio.Queue[Event] = asyncio.Queue()
        watching = await begun(collect(awaiter, seen))
        other = await begun(awaiter.released("of another session"))
        stage.side.say(worker.Farewell(code=Code.GENERATION_STALE, message="another start of the engine"))
        with pytest.raises(KvxferdError, match="another start"):
            await soon(other)
        assert isinstance(await soon(seen.get()), Disconnected)
        with pytest.raises(KvxferdError, match="another start"):
            await soon(awaiter.released("u"))
        await awaiter.close()
        await soon(watching)


class TestPulls:
    async def test_a_failure_is_raised_with_its_blocks(
        self, stage: Stage, rank: RankHandle, awaiter: Awaiter
    ) -> None:
        pull, requested = await pulled(stage, rank, awaiter)
        stage.side.say(
            worker.TicketFailed(
                ticket=requested.ticket, code=Code.RELEASED, message="gone", safe_to_reuse=True
            )
        )
        with pytest.raises(PullFailed, match="gone") as raised:
            await soon(pull)
        assert list(raised.value.failed.blocks["full"].ids) == [1, 2, 3]  # type: ignore[arg-type]
        assert raised.value.pull is pull
        assert pull.is_safe
        await soon(pull.safe())
        assert awaiter.pulls_in_doubt == ()

    async def test_cancelled_blocks_are_in_doubt_until_they_are_quiet(
        self, stage: Stage, rank: RankHandle, awaiter: Awaiter
    ) -> None:
        pull, requested = await pulled(stage, rank, awaiter)
        await cancelled(await begun(pull))  # at once: the daemon has said nothing
        assert (await aside(stage.side.expect, worker.Cancel)).ticket == requested.ticket
        assert awaiter.pulls_in_doubt == (pull,)
        is_safe = await begun(pull.safe())
        stage.side.say(worker.TicketFailed(ticket=requested.ticket, safe_to_reuse=False, **FAILED))
        with pytest.raises(PullFailed) as raised:
            await soon(pull)  # its end may still be awaited
        assert not raised.value.failed.safe_to_reuse
        assert not is_safe.done()
        assert awaiter.pulls_in_doubt == (pull,)
        stage.side.say(worker.TicketQuiesced(ticket=requested.ticket))
        await soon(is_safe)
        assert awaiter.pulls_in_doubt == ()

    async def test_waiting_for_safety_may_be_cancelled_and_repeated(
        self, stage: Stage, rank: RankHandle, awaiter: Awaiter
    ) -> None:
        pull, requested = await pulled(stage, rank, awaiter)
        await cancelled(await begun(pull.safe()))
        stage.side.say(worker.TicketFailed(ticket=requested.ticket, safe_to_reuse=True, **FAILED))
        await soon(pull.safe())

    async def test_a_delivery_that_was_quicker_than_the_cancel(
        self, stage: Stage, rank: RankHandle, awaiter: Awaiter
    ) -> None:
        pull, requested = await pulled(stage, rank, awaiter)
        await cancelled(await begun(pull))
        stage.side.say(worker.TicketDelivered(ticket=requested.ticket, **DELIVERED))
        await soon(pull.safe())
        assert isinstance(await soon(pull), Delivered)

    async def test_a_session_that_is_closed_leaves_doubt(
        self, stage: Stage, rank: RankHandle, awaiter: Awaiter
    ) -> None:
        pull, _ = await pulled(stage, rank, awaiter)
        task = await begun(pull)
        await awaiter.close()
        with pytest.raises(PullFailed) as raised:
            await soon(task)
        assert not raised.value.failed.safe_to_reuse
        with pytest.raises(KvxferdError, match="closed"):
            await soon(pull.safe())
        assert not pull.is_safe
        assert awaiter.pulls_in_doubt == (pull,)


class TestSuspended:
    async def test_it_returns_when_the_memory_is_free(
        self, stage: Stage, rank: RankHandle, awaiter: Awaiter
    ) -> None:
        rank.suspend()
        suspending = await begun(awaiter.suspended())
        await aside(stage.side.expect, worker.Suspend)
        assert not suspending.done()
        stage.side.say(worker.Suspended())
        await soon(suspending)
        await soon(awaiter.suspended())  # it is suspended already

    async def test_a_session_that_closes_ends_the_wait(self, stage: Stage, awaiter: Awaiter) -> None:
        """Also one that began while the session was closing."""
        closing = await begun(awaiter.close())
        with pytest.raises(KvxferdError, match="the client was closed"):
            await soon(asyncio.ensure_future(awaiter.suspended()))
        await soon(closing)

    async def test_a_resume_that_is_cancelled_is_suspended_again(
        self, stage: Stage, rank: RankHandle, awaiter: Awaiter
    ) -> None:
        """Its call goes on, and may have the memory mapped: `suspended` returns after the end of that."""
        rank.suspend()
        await aside(stage.side.expect, worker.Suspend)
        stage.side.say(worker.Suspended())
        await soon(awaiter.suspended())
        resuming = await begun(
            in_thread(lambda: rank.resume({REGION: stage.memory}, WAIT_S), lambda _: rank.suspend())
        )
        requested = await aside(stage.side.expect, worker.Resume)
        resuming.cancel()
        await aside(stage.side.accept_resume, requested.request, stage.new_mover())
        with pytest.raises(asyncio.CancelledError):
            await soon(resuming)
        suspending = await begun(awaiter.suspended())
        await aside(stage.side.expect, worker.Suspend)
        assert not suspending.done()
        stage.side.say(worker.Suspended())
        await soon(suspending)

    async def test_a_session_that_is_closed_first(self, rank: RankHandle, awaiter: Awaiter) -> None:
        suspending = await begun(awaiter.suspended())  # nothing has asked for it
        await awaiter.close()
        with pytest.raises(KvxferdError, match="closed"):
            await soon(suspending)
