"""Threads of a daemon: those without which it cannot serve, and those for one call that may block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from kvxferd.errors import ConfigError

T = TypeVar("T")


def start_thread(thread: threading.Thread, purpose: str) -> None:
    """Start a thread. `purpose`: what it does, as in "watch the file of keys".

    Raises ConfigError where the system has none: a limit of processes, or of memory.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise ConfigError(f"cannot {purpose}: {error}; raise the limit on threads") from error


def on_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Return what `work` returns or raises, called on a thread of its own.

    An executor's thread, as of `asyncio.to_thread`, is waited for at the exit, also one that never returns
    from a dead disk or name server; this is not. Raises RuntimeError where the system has no thread.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(end: Callable[[], None]) -> None:
        if not done.cancelled():
            end()

    def run() -> None:
        try:
            end = partial(done.set_result, work())
        except Exception as error:
            end = partial(done.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, end)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done
