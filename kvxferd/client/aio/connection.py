"""A connection that becomes one rank or one publisher."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, TypeVar

from kvxferd.client.aio.futures import in_thread
from kvxferd.client.aio.session import AsyncPublisher, AsyncRank
from kvxferd.client.client import Client
from kvxferd.client.client import connect as connect_and_wait
from kvxferd.client.memory_export import Regions
from kvxferd.client.mover_watch import LaunchMover
from kvxferd.client.rank import RankHandle
from kvxferd.layout import EngineSpec, RankLayout

T = TypeVar("T")


def connect(path: str | os.PathLike[str], *, timeout_s: float = 10.0, name: str = "") -> Connecting:
    """Connect to the daemon of this node: await it, or enter it with `async with`, which closes it again.

    Arguments and errors are those of `kvxferd.client.connect`.
    """
    return Connecting(lambda: connect_and_wait(path, timeout_s=timeout_s, name=name))


class Connecting:
    """A connection that is made when it is awaited or entered."""

    def __init__(self, call: Callable[[], Client]) -> None:
        self._connect = call
        self._client: AsyncClient | None = None

    def __await__(self) -> Generator[Any, None, AsyncClient]:
        return self._open().__await__()

    async def _open(self) -> AsyncClient:
        return AsyncClient(await in_thread(self._connect, Client.close))

    async def __aenter__(self) -> AsyncClient:
        self._client = await self._open()
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._client is not None
        await self._client.close()


class AsyncClient:
    """A connection that becomes one rank or one publisher. A process of several ranks opens one for each."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._session: AsyncPublisher | None = None

    async def register(
        self,
        engine: EngineSpec,
        layout: RankLayout,
        regions: Regions,
        timeout_s: float = 30.0,
        launch: LaunchMover | None = None,
    ) -> AsyncRank:
        """Become a rank. Arguments and errors are those of `Client.register`."""
        handle = await self._call(lambda: self.client.register(engine, layout, regions, timeout_s, launch))
        self._session = rank = AsyncRank(handle)
        return rank

    async def adopt(self, make: Callable[[Client], RankHandle]) -> AsyncRank:
        """Become a rank by a call that blocks, as `kvxferd.resident.register` does. It runs in a thread."""
        handle = await self._call(lambda: make(self.client))
        self._session = rank = AsyncRank(handle)
        return rank

    async def attach(
        self, engine_id: str, generation: str | None = None, timeout_s: float = 30.0
    ) -> AsyncPublisher:
        """Become a publisher without memory. Arguments and errors are those of `Client.attach`."""
        handle = await self._call(lambda: self.client.attach(engine_id, generation, timeout_s))
        self._session = publisher = AsyncPublisher(handle)
        return publisher

    async def _call(self, call: Callable[[], T]) -> T:
        # A registration whose caller has gone must not stay.
        return await in_thread(call, lambda _: self.client.close())

    async def close(self) -> None:
        """Close the connection, and with it the rank or publisher that it became."""
        if self._session is not None:
            await self._session.close()
        else:
            await asyncio.to_thread(self.client.close)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
