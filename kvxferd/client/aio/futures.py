"""Futures that end once, and calls that block in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def resolve(future: asyncio.Future[T] | None, result: T) -> None:
    """Set the result, unless there is no future or it has ended."""
    if future is not None and not future.done():
        future.set_result(result)


async def in_thread(call: Callable[[], T], undo: Callable[[T], object]) -> T:
    """Return what a blocking call returns. If the waiting task is cancelled, its late result is undone."""
    running = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        running.add_done_callback(lambda done: _undo(done, undo))
        raise


def _undo(done: asyncio.Future[T], undo: Callable[[T], object]) -> None:
    if not done.cancelled() and done.exception() is None:
        # `undo` joins a thread: not on the loop.
        done.get_loop().run_in_executor(None, undo, done.result())
