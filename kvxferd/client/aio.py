"""A session's events, with asyncio. No call of a session blocks, but for those that `in_thread` is for.

client = await in_thread(lambda: connect("/run/kvxferd/worker/worker.sock"), Client.close)
rank = await in_thread(lambda: client.register(engine=..., layout=..., regions=...), RankHandle.close)
ticket = rank.pull(ref, blocks, num_tokens=1000, deadline_s=30)    # the calls are the rank's own
async for event in events(rank):
    match event:
        case Delivered(ticket): ...
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TypeVar

from kvxferd.client.events import Event
from kvxferd.client.rank import Publisher
from kvxferd.errors import KvxferdError

T = TypeVar("T")


async def events(session: Publisher) -> AsyncIterator[Event]:
    """Yield a session's events, oldest first, until none is to come: see `Disconnected`.

    One task iterates, nothing else calls `poll`, and the iteration has ended, or its task was cancelled,
    before the session is closed. Who leaves the loop early may lose events that have come.
    """
    loop = asyncio.get_running_loop()
    while not session.is_over:
        readable, fd = asyncio.Event(), session.fileno()
        loop.add_reader(fd, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(fd)
        for event in session.poll():
            yield event
    for event in session.poll():  # that have come since
        yield event


async def in_thread(call: Callable[[], T], undo: Callable[[T], object]) -> T:
    """Return what a call returns that blocks, made in a thread: `connect`, `register`, `attach`, `resume`.

    Where the waiting task is cancelled, CancelledError is raised after the call's end, and after `undo` has
    taken back what it returned. To undo a `resume` is to suspend the rank, and the memory stays allocated
    until `Suspended`.
    """
    running = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        undone = asyncio.ensure_future(_undo(running, undo))
        while not undone.done():
            with suppress(asyncio.CancelledError):  # another one: this one is raised all the same
                await asyncio.shield(undone)
        raise


async def _undo(running: asyncio.Future[T], undo: Callable[[T], object]) -> None:
    with suppress(KvxferdError):
        await asyncio.to_thread(undo, await running)
