"""What a peer socket reports, without how its connections come and go, and what time it is."""

from __future__ import annotations

import asyncio

from kvxferd.core.events import Event, PeerConnected, PeerDisconnected, Tick


class Messages:
    """The events of a peer socket but ticks and those of connections: `put` takes all, in order."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Event] = asyncio.Queue()

    def put(self, event: Event) -> None:
        """Keep an event, unless it is a tick or of a connection."""
        if not isinstance(event, PeerConnected | PeerDisconnected | Tick):
            self._queue.put_nowait(event)

    async def next(self) -> Event:
        """Return the next one, as soon as there is one."""
        return await self._queue.get()

    def empty(self) -> bool:
        """Whether none is there."""
        return self._queue.empty()
