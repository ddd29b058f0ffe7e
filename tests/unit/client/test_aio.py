"""The client for asyncio, against a daemon that says what a test has it say."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvxferd.client import Delivered, Disconnected, PublishAccepted
from kvxferd.client.aio import AsyncPull, AsyncRank, PublishRefusedError, PullFailed, connect
from kvxferd.client.aio import session as aio_session
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.wire import worker
from tests.support.client_harness import LAYOUT, REF, REGION, SPEC, Stage, blocks
from tests.support.scripted_daemon import WAIT_S

DELIVERED = {"bytes": 1, "runs": 1, "wire_s": 0.1}
FAILED = {"code": Code.CANCELLED, "message": "cannot pull"}


async def soon(awaited: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(awaited, WAIT_S)


async def aside(call: Callable[..., Any], *args: Any) -> Any:
    """Make a blocking call of the daemon's, while the loop runs."""
    return await soon(asyncio.to_thread(call, *args))


async def rank_of(stage: Stage) -> AsyncRank:
    return AsyncRank(await asyncio.to_thread(stage.rank))


async def pulled(stage: Stage, rank: AsyncRank) -> tuple[AsyncPull, worker.Pull]:
    pull = rank.pull(REF, blocks(), num_tokens=48, deadline_s=30.0)
    return pull, await aside(stage.side.expect, worker.Pull)


async def awaiting(pull: AsyncPull) -> asyncio.Task[Delivered]:
    async def wait() -> Delivered:
        return await pull

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    return task


async def test_from_connect_to_delivered(stage: Stage) -> None:
    async def engine() -> Delivered:
        async with connect(stage.daemon.path, timeout_s=WAIT_S) as client:
            rank = await client.register(SPEC, LAYOUT, {REGION: stage.memory}, WAIT_S)
            return await rank.pull(REF, blocks(), num_tokens=48, deadline_s=30.0)

    running = asyncio.create_task(engine())
    side = stage.side = await aside(stage.daemon.accept)
    await aside(side.greet)
    await aside(side.register, stage.new_mover())
    asked = await aside(side.expect, worker.Pull)
    side.say(worker.Delivered(ticket=asked.ticket, bytes=7, runs=1, wire_s=0.1))
    assert (await soon(running)).bytes == 7


async def test_connect_that_is_cancelled_leaves_nothing(stage: Stage) -> None:
    async def engine() -> None:
        await connect(stage.daemon.path, timeout_s=WAIT_S)

    running = asyncio.create_task(engine())
    side = await aside(stage.daemon.accept)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await aside(side.greet)
    while True:  # the connection that came late is closed
        try:
            await aside(side.receive)
        except ConnectionError:
            break


class TestPublish:
    async def test_it_returns_when_the_daemon_has_accepted(self, stage: Stage) -> None:
        async with await rank_of(stage) as rank:
            publishing = asyncio.create_task(rank.publish("t", blocks(), num_tokens=48))
            asked = await aside(stage.side.expect, worker.Publish)
            assert asked.wants_reply
            await asyncio.sleep(0.05)
            assert not publishing.done()
            stage.side.say(worker.PublishAccepted(transfer_id="t"))
            ref = await soon(publishing)
            assert (ref.transfer_id, ref.nonce) == ("t", asked.nonce)
            stage.side.say(worker.Released(transfer_id="t", why=Code.COMPLETED))
            assert await soon(rank.released(ref)) is Code.COMPLETED
            assert await soon(rank.released(ref)) is Code.COMPLETED
            with pytest.raises(EngineError, match="this session did not publish it"):
                await rank.released(REF)

    async def test_a_refusal_is_raised(self, stage: Stage) -> None:
        async with await rank_of(stage) as rank:
            publishing = asyncio.create_task(rank.publish("t", blocks(), num_tokens=48))
            await aside(stage.side.expect, worker.Publish)
            refused = worker.PublishRefused(
                transfer_id="t", code=Code.BUSY, message="full", retry_after_s=2.0
            )
            stage.side.say(refused)
            with pytest.raises(PublishRefusedError, match="full") as raised:
                await soon(publishing)
            assert (raised.value.code, raised.value.retry_after_s) == (Code.BUSY, 2.0)
            with pytest.raises(EngineError, match="block 16"):
                await rank.publish("t", blocks(16), num_tokens=16)

    async def test_one_that_ends_before_it_is_accepted(self, stage: Stage) -> None:
        async with await rank_of(stage) as rank:
            publishing = asyncio.create_task(rank.publish("t", blocks(), num_tokens=48))
            await aside(stage.side.expect, worker.Publish)
            stage.side.say(worker.Released(transfer_id="t", why=Code.RANK_LOST))
            with pytest.raises(KvxferdError) as raised:
                await soon(publishing)
            assert raised.value.code is Code.RANK_LOST

    async def test_one_whose_task_is_cancelled_is_withdrawn(self, stage: Stage) -> None:
        async with await rank_of(stage) as rank:
            publishing = asyncio.create_task(rank.publish("t", blocks(), num_tokens=48))
            asked = await aside(stage.side.expect, worker.Publish)
            publishing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await publishing
            assert (await aside(stage.side.expect, worker.Unpublish)).transfer_id == "t"
            stage.side.say(worker.PublishAccepted(transfer_id="t"))
            stage.side.say(worker.Released(transfer_id="t", why=Code.UNPUBLISHED))
            ref = {**REF.to_dict(), "transfer_id": "t", "nonce": asked.nonce}
            assert await soon(rank.released(ref)) is Code.UNPUBLISHED

    async def test_of_many_those_that_ended_first_are_forgotten(
        self, stage: Stage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One that is live for long keeps none of the others."""
        monkeypatch.setattr(aio_session, "MAX_REMEMBERED", 3)
        async with await rank_of(stage) as rank:
            refs = {}
            for name in "abcde":
                publishing = asyncio.create_task(rank.publish(name, blocks(), num_tokens=48))
                await aside(stage.side.expect, worker.Publish)
                stage.side.say(worker.PublishAccepted(transfer_id=name))
                refs[name] = await soon(publishing)
                if name != "a":
                    stage.side.say(worker.Released(transfer_id=name, why=Code.COMPLETED))
                    await soon(rank.released(refs[name]))
            for name in "bc":
                with pytest.raises(EngineError, match="did not publish it"):
                    await rank.released(refs[name])
            assert await soon(rank.released(refs["d"])) is Code.COMPLETED
            stage.side.say(worker.Released(transfer_id="a", why=Code.LEASE_EXPIRED))
            assert await soon(rank.released(refs["a"])) is Code.LEASE_EXPIRED

    async def test_one_reply_over_a_restart(self, stage: Stage) -> None:
        async with await rank_of(stage) as rank:
            kept = asyncio.create_task(rank.publish("kept", blocks(), num_tokens=48))
            await aside(stage.side.expect, worker.Publish)
            stage.side.say(worker.PublishAccepted(transfer_id="kept"))
            await soon(kept)
            waits = asyncio.create_task(rank.publish("waits", blocks(4), num_tokens=16))
            await aside(stage.side.expect, worker.Publish)
            stage.daemon.stop()
            stage.daemon.start()
            await asyncio.to_thread(stage.rejoin)
            again = [await aside(stage.side.expect, worker.Publish) for _ in range(2)]
            assert {one.transfer_id: one.wants_reply for one in again} == {"kept": False, "waits": True}
            stage.side.say(worker.PublishAccepted(transfer_id="waits"))
            await soon(waits)

    async def test_the_session_ends_meanwhile(self, stage: Stage) -> None:
        rank = await rank_of(stage)
        publishing = asyncio.create_task(rank.publish("t", blocks(), num_tokens=48))
        await aside(stage.side.expect, worker.Publish)
        await rank.close()
        with pytest.raises(KvxferdError):
            await soon(publishing)
        with pytest.raises(KvxferdError, match="closed"):
            rank.pull(REF, blocks(), num_tokens=48, deadline_s=1.0)


class TestPulls:
    async def test_a_failure_is_raised_with_its_blocks(self, stage: Stage) -> None:
        async with await rank_of(stage) as rank:
            pull, asked = await pulled(stage, rank)
            stage.side.say(
                worker.Failed(ticket=asked.ticket, code=Code.RELEASED, message="gone", safe_to_reuse=True)
            )
            with pytest.raises(PullFailed, match="gone") as raised:
                await soon(pull)
            assert list(raised.value.failed.blocks["full"].ids) == [1, 2, 3]  # type: ignore[arg-type]
            assert raised.value.pull is pull
            assert pull.is_safe
            await soon(pull.safe())
            assert rank.pulls_in_doubt == ()

    async def test_cancelled_blocks_are_in_doubt_until_they_are_quiet(self, stage: Stage) -> None:
        async with await rank_of(stage) as rank:
            pull, asked = await pulled(stage, rank)
            task = await awaiting(pull)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task  # at once: the daemon has said nothing
            assert (await aside(stage.side.expect, worker.Cancel)).ticket == asked.ticket
            assert rank.pulls_in_doubt == (pull,)
            is_safe = asyncio.create_task(pull.safe())
            stage.side.say(worker.Failed(ticket=asked.ticket, safe_to_reuse=False, **FAILED))
            with pytest.raises(PullFailed) as raised:
                await soon(pull)  # its end may still be awaited
            assert not raised.value.failed.safe_to_reuse
            assert not is_safe.done()
            assert rank.pulls_in_doubt == (pull,)
            stage.side.say(worker.Quiesced(ticket=asked.ticket))
            await soon(is_safe)
            assert rank.pulls_in_doubt == ()

    async def test_waiting_for_safety_may_be_cancelled_and_repeated(self, stage: Stage) -> None:
        async with await rank_of(stage) as rank:
            pull, asked = await pulled(stage, rank)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(pull.safe(), 0.05)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(pull, 0.05)  # this cancels it
            await aside(stage.side.expect, worker.Cancel)
            stage.side.say(worker.Failed(ticket=asked.ticket, safe_to_reuse=True, **FAILED))
            await soon(pull.safe())

    async def test_a_delivery_that_was_quicker_than_the_cancel(self, stage: Stage) -> None:
        async with await rank_of(stage) as rank:
            pull, asked = await pulled(stage, rank)
            task = await awaiting(pull)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            stage.side.say(worker.Delivered(ticket=asked.ticket, **DELIVERED))
            await soon(pull.safe())
            assert isinstance(await soon(pull), Delivered)

    async def test_one_that_nobody_awaits_ends_too(self, stage: Stage) -> None:
        async with await rank_of(stage) as rank:
            pull, asked = await pulled(stage, rank)
            stage.side.say(worker.Failed(ticket=asked.ticket, safe_to_reuse=True, **FAILED))
            await soon(pull.safe())

    async def test_a_session_that_is_closed_leaves_doubt(self, stage: Stage) -> None:
        rank = await rank_of(stage)
        pull, _ = await pulled(stage, rank)
        task = await awaiting(pull)
        await rank.close()
        with pytest.raises(PullFailed) as raised:
            await soon(task)
        assert not raised.value.failed.safe_to_reuse
        with pytest.raises(KvxferdError, match="closed"):
            await soon(pull.safe())
        assert not pull.is_safe
        assert rank.pulls_in_doubt == (pull,)

    async def test_a_dead_daemon_quiets_its_pulls_by_its_movers_death(self, stage: Stage) -> None:
        async with await rank_of(stage) as rank:
            pull, _ = await pulled(stage, rank)
            stage.daemon.stop()
            stage.mover.die()
            with pytest.raises(PullFailed) as raised:
                await soon(pull)
            assert raised.value.failed.safe_to_reuse
            await soon(pull.safe())


async def test_events_are_yielded_as_well(stage: Stage) -> None:
    rank = await rank_of(stage)
    seen, over = [], asyncio.Event()

    async def watch() -> None:
        async for event in rank.events():
            seen.append(event)
            if isinstance(event, Disconnected):
                over.set()

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    publishing = asyncio.create_task(rank.publish("t", blocks(), num_tokens=48))
    await aside(stage.side.expect, worker.Publish)
    stage.side.say(worker.PublishAccepted(transfer_id="t"))
    await soon(publishing)
    stage.side.say(worker.Farewell(code=Code.GENERATION_STALE, message="another start of the engine"))
    await soon(over.wait())
    with pytest.raises(KvxferdError, match="another start"):
        await rank.publish("u", blocks(), num_tokens=48)
    await rank.close()
    await soon(watching)
    assert seen[0] == PublishAccepted("t")
    assert [event async for event in rank.events()] == []


async def test_suspend_returns_when_the_memory_is_free(stage: Stage) -> None:
    async with await rank_of(stage) as rank:
        suspending = asyncio.create_task(rank.suspend())
        await aside(stage.side.expect, worker.Suspend)
        await asyncio.sleep(0.05)
        assert not suspending.done()
        stage.side.say(worker.Suspended())
        await soon(suspending)
        await soon(rank.suspend())  # it is suspended already


async def test_suspend_waits_for_a_resume_whose_task_was_cancelled(stage: Stage) -> None:
    """Its thread goes on, and would have the memory mapped after `suspend` has returned."""
    async with await rank_of(stage) as rank:
        suspending = asyncio.create_task(rank.suspend())
        await aside(stage.side.expect, worker.Suspend)
        stage.side.say(worker.Suspended())
        await soon(suspending)
        may_begin, resume = threading.Event(), rank.handle.resume

        def late(*arguments: Any) -> None:
            may_begin.wait(WAIT_S)
            resume(*arguments)

        rank.handle.resume = late  # type: ignore[method-assign]
        resuming = asyncio.create_task(rank.resume({REGION: stage.memory}, WAIT_S))
        await asyncio.sleep(0.01)
        resuming.cancel()
        assert isinstance((await asyncio.gather(resuming, return_exceptions=True))[0], asyncio.CancelledError)
        suspending = asyncio.create_task(rank.suspend())
        await asyncio.sleep(0.05)
        assert not suspending.done()
        may_begin.set()
        asked = await aside(stage.side.expect, worker.Resume)
        await aside(stage.side.accept_resume, asked.request, stage.new_mover())
        await aside(stage.side.expect, worker.Suspend)
        assert not suspending.done()
        stage.side.say(worker.Suspended())
        await soon(suspending)
