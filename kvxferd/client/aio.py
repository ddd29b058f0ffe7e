"""A session's events, awaited with asyncio.

    client = await in_thread(lambda: connect("/run/kvxferd/worker/worker.sock"), Client.close)
    rank = await in_thread(lambda: client.register(engine=..., layout=..., regions=...), RankHandle.close)
    async with Awaiter(rank) as events:
        ref = rank.publish("req-1", blocks, num_tokens=1000)           # the calls are the rank's own

        pull = events.pull(rank.pull(ref, blocks, num_tokens=1000, deadline_s=30))
        try:
            delivered = await pull                                     # PullFailed is raised
        finally:
            await pull.safe()                                          # nothing writes the blocks any more

        await events.released("req-1")                                 # the blocks are the engine's again

Cancelling a task that awaits a pull cancels the pull, and raises CancelledError at once: the blocks may
still be written then, as after a `Failed` that is not `safe_to_reuse`. They stay out of use until
`AsyncPull.safe` returns. `Awaiter.pulls_in_doubt` has every pull whose blocks are in that state, also those
that nobody kept.

Every object belongs to the event loop that made it. No call blocks the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from kvxferd.client.events import Delivered, Disconnected, Event, Failed, PullTicket, Quiesced
from kvxferd.client.rank import Publisher
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.wire.worker import PublishRefused, Released, Suspended

T = TypeVar("T")

# The ends that are kept until they are awaited: of as many transfers as a session may have published at once.
MAX_REMEMBERED = 4096


class PublishRefusedError(EngineError):
    """The daemon refused a publish: nothing was readable, and the blocks are the engine's again."""

    def __init__(self, refused: PublishRefused) -> None:
        super().__init__(refused.message, refused.code)
        self.retry_after_s = refused.retry_after_s
        self.refused = refused


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
            self.ticket.cancel()
            raise
        if isinstance(end, Failed):
            raise PullFailed(end, self)
        return end

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

    def _handle(self, event: Delivered | Failed | Quiesced) -> None:
        if not isinstance(event, Quiesced):
            _resolve(self._end, event)
        if not isinstance(event, Failed) or event.safe_to_reuse:
            _resolve(self._safe, None)

    def _lost(self, error: KvxferdError) -> None:
        """Handle the end of the session, after its last event."""
        _resolve(self._safe, error)

    def __repr__(self) -> str:
        return f"<AsyncPull {self.ticket.number} of {self.ticket.transfer_id}>"


class Awaiter:
    """Reads the events of a session, and ends what is awaited. Nothing else may call the session's `poll`.

    Leaving `async with` closes the session.
    """

    def __init__(self, session: Publisher) -> None:
        self._session = session
        self._loop = asyncio.get_running_loop()
        self._pulls: dict[PullTicket, AsyncPull] = {}
        self._transfers: dict[str, asyncio.Future[Released | PublishRefused | KvxferdError]] = {}
        self._streams: list[asyncio.Queue[Event | None]] = []
        self._over: KvxferdError | None = None
        self._closing: asyncio.Task[None] | None = None
        self._fd = session.fileno()
        self._loop.add_reader(self._fd, self._dispatch)

    def pull(self, ticket: PullTicket) -> AsyncPull:
        """Return the pull of this ticket, to await. It has started, whether it is awaited or not.

        Call it as soon as there is a ticket, before anything is awaited: an event that comes first is lost.
        """
        pull = self._pulls[ticket] = AsyncPull(ticket, self._loop)
        return pull

    @property
    def pulls_in_doubt(self) -> tuple[AsyncPull, ...]:
        """The pulls whose blocks may still be written, those that run and those that were cancelled."""
        return tuple(self._pulls.values())

    async def released(self, transfer_id: str) -> Released:
        """Return the end of a transfer, when it has ended: its blocks are the engine's again.

        The session must have published it, or be a rank of its engine: of any other id no end comes. The
        latest 4,096 ends are remembered.

        Raises:
            PublishRefusedError: the transfer was refused. The id may be published again then.
            KvxferdError: the session ended first.
        """
        ending = self._transfers.get(transfer_id) or self._remember(transfer_id)
        if self._over is not None:
            _resolve(ending, self._over)
        end = await asyncio.shield(ending)
        if isinstance(end, PublishRefused):
            self._transfers.pop(transfer_id, None)
            raise PublishRefusedError(end)
        if isinstance(end, KvxferdError):
            raise end
        return end

    async def suspended(self) -> None:
        """Return when the rank is suspended, after `RankHandle.suspend`: its memory may be freed then.

        Raises KvxferdError where the session is closed first.
        """
        if self._session.is_suspended:
            return
        async for event in self.events():
            if isinstance(event, Suspended):
                return
        assert self._over is not None
        raise self._over

    async def events(self) -> AsyncIterator[Event]:
        """Yield every event of the session from the first call of `anext` on, until `close`.

        Events that end what is awaited are yielded too.
        """
        if self._closing is not None and self._closing.done():
            return
        stream: asyncio.Queue[Event | None] = asyncio.Queue()
        self._streams.append(stream)
        try:
            while (event := await stream.get()) is not None:
                yield event
        finally:
            self._streams.remove(stream)

    async def close(self) -> None:
        """End the session, as `Publisher.close` does. What is awaited ends; idempotent.

        A pull that was in doubt stays so for ever: `AsyncPull.safe` raises. Let pulls end before.
        """
        if self._closing is None:
            self._loop.remove_reader(self._fd)
            self._closing = self._loop.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await asyncio.to_thread(self._session.close)
        self._dispatch()
        error = self._end(KvxferdError("the session is over: the client was closed", Code.CANCELLED))
        for pull in self._pulls.values():
            pull._lost(error)
        for stream in self._streams:
            stream.put_nowait(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _remember(self, transfer_id: str) -> asyncio.Future[Released | PublishRefused | KvxferdError]:
        """Return a new future for the end of a transfer."""
        end = self._transfers[transfer_id] = self._loop.create_future()
        if len(self._transfers) > MAX_REMEMBERED:
            # The first that has ended: one that is live for hours is before all others.
            ended = next((known for known, one in self._transfers.items() if one.done()), None)
            if ended is not None:
                del self._transfers[ended]
        return end

    def _dispatch(self) -> None:
        """Hand out the session's events. Never raises: an event loop would only log it."""
        for event in self._session.poll():
            for stream in self._streams:
                stream.put_nowait(event)
            self._handle(event)

    def _handle(self, event: Event) -> None:
        match event:
            case PublishRefused() | Released():
                end = self._transfers.get(event.transfer_id)
                if end is None or end.done():  # done: by the refusal of an earlier publish
                    end = self._remember(event.transfer_id)
                _resolve(end, event)
            case Delivered() | Failed() | Quiesced():
                if (pull := self._pulls.get(event.ticket)) is not None:
                    pull._handle(event)
                    if pull.is_safe:
                        del self._pulls[event.ticket]
            case Suspended():
                pass  # `suspended` reads the stream
            case Disconnected():
                self._end(KvxferdError(f"the session is over: {event.message}", event.code))

    def _end(self, error: KvxferdError) -> KvxferdError:
        """End what is awaited, but for pulls, which a mover may still quiesce. Return the first error."""
        if self._over is None:
            self._over = error
        for end in self._transfers.values():
            _resolve(end, self._over)
        return self._over


async def in_thread(call: Callable[[], T], undo: Callable[[T], object]) -> T:
    """Return what a call returns that blocks, made in a thread: `connect`, `register`, `attach`, `resume`.

    Where the waiting task is cancelled, CancelledError is raised after the call's end, and after `undo` has
    taken back what it returned. To undo a `resume` is to suspend the rank, and the memory stays allocated
    until `Awaiter.suspended` returns.
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


def _resolve(future: asyncio.Future[T], result: T) -> None:
    """Set the result, unless the future has ended."""
    if not future.done():
        future.set_result(result)
