"""Concurrent tasks and signals for tools that run child processes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Iterable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def gather_or_cancel(*awaitables: Awaitable[T]) -> list[T]:
    """Await all concurrently; the first exception cancels the others."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _cancel_all(tasks)


async def run_until_signal(work: Awaitable[T]) -> T:
    """Return the result of `work`. SIGTERM and SIGHUP end it as Ctrl-C does, with KeyboardInterrupt.

    Only the first signal counts: a second one (`timeout` sends two) would interrupt the clean-up,
    which ends by itself.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    is_cancelled = False

    def on_signal() -> None:
        nonlocal is_cancelled
        if not is_cancelled:
            is_cancelled = True
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        with suppress(ValueError, RuntimeError):  # not the main thread, as in a test
            loop.add_signal_handler(number, on_signal)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def _cancel_all(tasks: Iterable[asyncio.Future[T]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
