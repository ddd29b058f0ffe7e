"""Pulls that are awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

from kvxferd.client.aio.futures import resolve
from kvxferd.client.events import Delivered, Failed, PullTicket
from kvxferd.errors import EngineError, KvxferdError


class PullFailed(EngineError):
    """A pull ended without its bytes.

    Attributes:
        failed: the event, with the code, the blocks and `safe_to_reuse`.
        pull: the pull; `await pull.safe()` returns when the blocks may be used again.
    """

    def __init__(self, failed: Failed, pull: AsyncPull) -> None:
        super().__init__(failed.message, failed.code)
        self.retry_after_s = failed.retry_after_s
        self.failed = failed
        self.pull = pull


class AsyncPull:
    """One pull that was started. Await it for its end.

    Attributes:
        ticket: the session's ticket of this pull.
    """

    def __init__(self, ticket: PullTicket, loop: asyncio.AbstractEventLoop) -> None:
        self.ticket = ticket
        # Results only: an exception that nobody retrieves would be logged.
        self._end: asyncio.Future[Delivered | Failed] = loop.create_future()
        self._safe: asyncio.Future[KvxferdError | None] = loop.create_future()

    def __await__(self) -> Generator[Any, None, Delivered]:
        """Return Delivered. Raises PullFailed, and cancels the pull where the awaiting task is cancelled."""
        return self._wait().__await__()

    async def _wait(self) -> Delivered:
        try:
            end = await asyncio.shield(self._end)
        except asyncio.CancelledError:
            self.cancel()
            raise
        if isinstance(end, Failed):
            raise PullFailed(end, self)
        return end

    def cancel(self) -> None:
        """Request the end of the pull. It still ends as `await` tells: Delivered, if that was quicker."""
        if not self._end.done():
            self.ticket.cancel()

    @property
    def is_safe(self) -> bool:
        """Whether nothing writes the blocks any more."""
        return self._safe.done() and self._safe.result() is None

    async def safe(self) -> None:
        """Return when nothing writes the blocks any more, however the pull ended.

        That is with Delivered, with a Failed that is `safe_to_reuse`, or with the Quiesced that follows one
        that is not. Cancelling the task that waits here changes nothing: call it again. Raises KvxferdError
        where that will never be known, because the session was closed first: then the blocks stay out of
        use until this process ends.
        """
        error = await asyncio.shield(self._safe)
        if error is not None:
            raise error

    # --- called by the session

    def _ended(self, end: Delivered | Failed) -> None:
        resolve(self._end, end)
        if isinstance(end, Delivered) or end.safe_to_reuse:
            resolve(self._safe, None)

    def _quiesced(self) -> None:
        resolve(self._safe, None)

    def _lost(self, error: KvxferdError) -> None:
        """Handle the end of the session, after its last event."""
        resolve(self._safe, error)

    def __repr__(self) -> str:
        return f"<AsyncPull {self.ticket.number} of {self.ticket.transfer_id}>"
