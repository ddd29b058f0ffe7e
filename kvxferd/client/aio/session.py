"""A session whose events end what is awaited."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from types import TracebackType

from kvxferd.client.aio.futures import resolve
from kvxferd.client.aio.pulls import AsyncPull
from kvxferd.client.blocks import BlockList
from kvxferd.client.events import (
    Delivered,
    Disconnected,
    Event,
    Failed,
    PublishAccepted,
    PublishRefused,
    PullTicket,
    Quiesced,
    Released,
    Suspended,
)
from kvxferd.client.gpu_events import Completion
from kvxferd.client.memory_export import Regions
from kvxferd.client.rank import Publisher, RankHandle
from kvxferd.client.refs import RefLike, TransferRef, read_ref
from kvxferd.errors import Code, EngineError, KvxferdError

# The ends of transfers that nobody has waited for: as many as a session may have published at once.
MAX_REMEMBERED = 4096


class PublishRefusedError(EngineError):
    """The daemon refused a publish: nothing was readable, and the blocks are the engine's again."""

    def __init__(self, refused: PublishRefused) -> None:
        super().__init__(refused.message, refused.code)
        self.retry_after_s = refused.retry_after_s
        self.refused = refused


class AsyncPublisher:
    """A session that publishes for an engine. `handle` is the session itself, whose events this reads."""

    def __init__(self, handle: Publisher) -> None:
        self.handle = handle
        self._loop = asyncio.get_running_loop()
        self._accepted: dict[str, asyncio.Future[PublishRefused | Released | None]] = {}
        self._released: OrderedDict[str, asyncio.Future[Code]] = OrderedDict()
        self._pulls: dict[PullTicket, AsyncPull] = {}
        self._streams: list[asyncio.Queue[Event | None]] = []
        self._suspended: list[asyncio.Future[None]] = []
        self._over: KvxferdError | None = None
        self._closing: asyncio.Task[None] | None = None
        self._fd = handle.fileno()
        self._loop.add_reader(self._fd, self._dispatch)

    async def publish(
        self,
        transfer_id: str,
        blocks: Mapping[str, BlockList],
        num_tokens: int,
        num_readers: int = 1,
        lease_s: float | None = None,
        after: Completion | None = None,
        traceparent: str | None = None,
        ready_tokens: int | None = None,
        nonce: str | None = None,
    ) -> TransferRef:
        """Publish a transfer, and return its reference once the daemon has accepted it.

        Arguments and the contract are those of `Publisher.publish`. With `after` this waits for the kernels
        too. Where the waiting task is cancelled the transfer is withdrawn: its blocks are the engine's again
        when `released` returns.

        Raises:
            PublishRefusedError: the daemon refused it; so may the client (`device-error`, `blocks-invalid`).
            EngineError: as `Publisher.publish` does.
            KvxferdError: it ended before it was accepted: its lease expired, or the session did.
        """
        self._check_open()
        ref = self.handle.publish(
            transfer_id,
            blocks,
            num_tokens,
            num_readers,
            lease_s,
            after,
            reply_when_accepted=True,
            traceparent=traceparent,
            ready_tokens=ready_tokens,
            nonce=nonce,
        )
        name = str(ref.transfer_id)
        accepted = self._accepted[name] = self._loop.create_future()
        self._remember(name)
        try:
            refusal = await accepted
        except asyncio.CancelledError:
            self._accepted.pop(name, None)
            with suppress(KvxferdError):
                self.handle.unpublish(ref)
            raise
        if isinstance(refusal, PublishRefused):
            raise PublishRefusedError(refusal)
        if refusal is not None:
            raise KvxferdError(f"cannot publish {name}: it ended ({refusal.why})", refusal.why)
        if self._over is not None:
            raise self._over
        return ref

    def unpublish(self, ref: RefLike) -> None:
        """Withdraw a transfer. Its blocks are the engine's again when `released` returns."""
        self.handle.unpublish(ref)

    async def released(self, transfer: RefLike) -> Code:
        """Return why a transfer of this session ended, when it has: its blocks are the engine's again.

        `transfer` is what `publish` returned. Raises EngineError (`transfer-unknown`) for a transfer that
        this session has not published, or one that ended 4,096 transfers ago.
        """
        name = str(read_ref(transfer).transfer_id)
        if (found := self._released.get(name)) is None:
            raise EngineError(
                f"cannot wait for transfer {name}: this session did not publish it", Code.TRANSFER_UNKNOWN
            )
        return await asyncio.shield(found)

    async def events(self) -> AsyncIterator[Event]:
        """Yield every event of the session from the first call of `anext` on, until `close`.

        Events that end what is awaited are yielded too. One that nobody iterates over is dropped.
        """
        if self._closing is not None:
            return
        stream: asyncio.Queue[Event | None] = asyncio.Queue()
        self._streams.append(stream)
        try:
            while (event := await stream.get()) is not None:
                yield event
        finally:
            self._streams.remove(stream)

    @property
    def is_connected(self) -> bool:
        """Whether a daemon takes requests now."""
        return self.handle.is_connected

    async def close(self) -> None:
        """End the session, as `Publisher.close` does. What is awaited ends; idempotent.

        A pull that was in doubt stays so for ever: `AsyncPull.safe` raises. Let pulls end before.
        """
        if self._closing is None:
            self._loop.remove_reader(self._fd)
            self._closing = self._loop.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await asyncio.to_thread(self.handle.close)
        self._dispatch()
        self._end(KvxferdError("the session is over: the client was closed", Code.CANCELLED))

    async def __aenter__(self) -> AsyncPublisher:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._over is not None:
            raise self._over

    def _remember(self, name: str) -> None:
        self._released[name] = self._loop.create_future()
        self._released.move_to_end(name)
        if len(self._released) > MAX_REMEMBERED:
            # The first that has ended: one that is live for hours is before all others.
            ended = next((one for one, why in self._released.items() if why.done()), None)
            if ended is not None:
                del self._released[ended]

    def _dispatch(self) -> None:
        """Hand out the session's events. Never raises: an event loop would only log it."""
        for event in self.handle.poll():
            for stream in self._streams:
                stream.put_nowait(event)
            self._handle(event)

    def _handle(self, event: Event) -> None:
        match event:
            case PublishAccepted():
                resolve(self._accepted.pop(event.transfer_id, None), None)
            case PublishRefused():
                resolve(self._accepted.pop(event.transfer_id, None), event)
                resolve(self._released.get(event.transfer_id), event.code)
            case Released():
                resolve(self._accepted.pop(event.transfer_id, None), event)
                resolve(self._released.get(event.transfer_id), event.why)
            case Delivered() | Failed():
                if (pull := self._pulls.get(event.ticket)) is not None:
                    pull._ended(event)
                    self._forget_if_safe(pull)
            case Quiesced():
                if (pull := self._pulls.get(event.ticket)) is not None:
                    pull._quiesced()
                    self._forget_if_safe(pull)
            case Suspended():
                while self._suspended:
                    resolve(self._suspended.pop(), None)
            case Disconnected():
                self._end(KvxferdError(f"the session is over: {event.message}", event.code))

    def _forget_if_safe(self, pull: AsyncPull) -> None:
        if pull.is_safe:
            self._pulls.pop(pull.ticket, None)

    def _end(self, error: KvxferdError) -> None:
        """End what is awaited: no event follows any more, but for pulls that a mover may still quiesce."""
        if self._over is None:
            self._over = error
        for accepted in self._accepted.values():
            resolve(accepted, None)
        self._accepted.clear()
        for waiting in self._suspended:
            resolve(waiting, None)
        self._suspended.clear()
        if self._closing is not None:
            for stream in self._streams:
                stream.put_nowait(None)
            for pull in self._pulls.values():
                pull._lost(error)
            for released in self._released.values():
                resolve(released, error.code)


class AsyncRank(AsyncPublisher):
    """A registered rank: it publishes transfers and pulls others into its memory."""

    handle: RankHandle

    def __init__(self, handle: RankHandle) -> None:
        super().__init__(handle)
        self._resuming: set[asyncio.Future[None]] = set()

    def extend(
        self,
        transfer_id: str,
        ready_tokens: int | None = None,
        blocks: Mapping[str, BlockList] | None = None,
        after: Completion | None = None,
    ) -> None:
        """Report how far this rank has written a transfer; see `RankHandle.extend`."""
        self._check_open()
        self.handle.extend(transfer_id, ready_tokens, blocks, after)

    def ready(self, transfer_id: str, after: Completion | None = None) -> None:
        """Report that this rank has finished writing a transfer's blocks, as `RankHandle.ready` does."""
        self.handle.ready(transfer_id, after)

    def prepare(self, ref: RefLike) -> None:
        """Announce a pull of this transfer."""
        self.handle.prepare(ref)

    def abandon(self, ref: RefLike) -> None:
        """Report that no rank of this rank's engine will read the transfer any more."""
        self.handle.abandon(ref)

    def pull(
        self,
        ref: RefLike,
        blocks: Mapping[str, BlockList],
        num_tokens: int,
        deadline_s: float,
        after: Completion | None = None,
        traceparent: str | None = None,
        progressive: bool = False,
    ) -> AsyncPull:
        """Start to read a transfer into these blocks; await the result for its end.

        Arguments, contract and errors are those of `RankHandle.pull`. It has started when this returns,
        whether it is awaited or not.
        """
        self._check_open()
        ticket = self.handle.pull(ref, blocks, num_tokens, deadline_s, after, traceparent, progressive)
        pull = self._pulls[ticket] = AsyncPull(ticket, self._loop)
        return pull

    @property
    def pulls_in_doubt(self) -> tuple[AsyncPull, ...]:
        """The pulls whose blocks may still be written, those that run and those that were cancelled."""
        return tuple(pull for pull in self._pulls.values() if not pull.is_safe)

    async def suspend(self) -> None:
        """Return when no other process maps the rank's memory, which may be freed then.

        That is after the end of a `resume` whose waiting task was cancelled.
        """
        self._check_open()
        while self._resuming:
            await asyncio.wait(self._resuming)
        if self.handle.is_suspended:
            return
        waiting: asyncio.Future[None] = self._loop.create_future()
        self._suspended.append(waiting)
        self.handle.suspend()
        await asyncio.shield(waiting)
        self._check_open()

    async def resume(self, regions: Regions, timeout_s: float = 30.0) -> None:
        """Register the rank's memory again, as `RankHandle.resume` does.

        Cancelling the task that waits does not end it: the memory stays allocated until `suspend` returns.
        """
        running = asyncio.ensure_future(asyncio.to_thread(self.handle.resume, regions, timeout_s))
        self._resuming.add(running)
        running.add_done_callback(self._resumed)
        await asyncio.shield(running)

    def _resumed(self, running: asyncio.Future[None]) -> None:
        self._resuming.discard(running)
        if not running.cancelled():
            running.exception()  # one that nobody retrieves would be logged

    async def __aenter__(self) -> AsyncRank:
        return self
