"""A worker socket that listens, without a daemon behind it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from kvxferd.config import LimitsConfig, WorkerConfig
from kvxferd.control.fd_budget import max_memory_fds_of
from kvxferd.control.turns import Turns
from kvxferd.control.worker_socket import WorkerSocket
from kvxferd.core import events as ev
from kvxferd.errors import Code
from kvxferd.layout import EngineSpec
from kvxferd.layout.presets import attention_layout
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import DAEMON_MESSAGES, encode
from kvxferd.wire.common import Message
from kvxferd.wire.framing import FrameDecoder, encode_frame
from tests.support.other_user import open_directory

SPEC = EngineSpec("e", "g", num_layers=1, num_kv_heads=1)


LAYOUT = attention_layout(
    spec=SPEC, num_kv_heads=1, head_dim=16, block_tokens=16, num_blocks=64, layout="HND"
)


class Listening:
    """A worker socket, what it said, and sessions by hand."""

    def __init__(self, workers: WorkerSocket, path: str, received: asyncio.Queue[ev.Event]) -> None:
        self.workers, self.path, self.received = workers, path, received
        self.opened: list[socket.socket] = []

    async def connection(self) -> socket.socket:
        """A connection that has said nothing."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        await asyncio.get_running_loop().sock_connect(connection, self.path)
        self.opened.append(connection)
        return connection

    async def session(self) -> socket.socket:
        """A session that has said hello."""
        connection = await self.connection()
        await self.say(connection, wk.Hello(versions=wk.WORKER_VERSIONS, client="x"))
        return connection

    async def say(self, connection: socket.socket, message: Message, *fds: int) -> None:
        await self.send(connection, encode_frame(encode(message), len(fds)), *fds)

    async def register(self, connection: socket.socket, num_descriptors: int, *fds: int) -> None:
        """Register, with a socket for deliveries behind these descriptors."""
        with socket.socket() as deliveries:
            await self.say(connection, register(num_descriptors), *fds, deliveries.fileno())

    async def send(self, connection: socket.socket, content: bytes, *fds: int) -> None:
        sent = socket.send_fds(connection, [content], list(fds))
        await asyncio.get_running_loop().sock_sendall(connection, content[sent:])

    async def event(self, kind: type) -> Any:
        """The next event of this kind."""
        while True:
            event = await asyncio.wait_for(self.received.get(), 20)
            if isinstance(event, kind):
                return event

    async def said(self, message: type) -> ev.WorkerMessage:
        """The event of such a message."""
        while True:
            event: ev.WorkerMessage = await self.event(ev.WorkerMessage)
            if isinstance(event.message, message):
                return event

    async def heard(self, connection: socket.socket) -> Message:
        """What the socket says last there."""
        content = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(connection, 1 << 16), 20)
        *_, frame = FrameDecoder().feed(content)
        return DAEMON_MESSAGES.decode(frame.payload)

    async def code_of_farewell(self, connection: socket.socket) -> Code:
        message = await self.heard(connection)
        assert isinstance(message, wk.Farewell)
        return message.code


@asynccontextmanager
async def listening(
    max_sessions: int = 256, on_event: Callable[[ev.Event], None] | None = None, **config: Any
) -> AsyncIterator[Listening]:
    """A worker socket in a directory that everybody may enter. `on_event`: sees each event first."""
    received: asyncio.Queue[ev.Event] = asyncio.Queue()

    def hear(event: ev.Event) -> None:
        if on_event is not None:
            on_event(event)
        received.put_nowait(event)

    with open_directory() as directory:
        path = str(directory / "worker.sock")
        workers = WorkerSocket(
            WorkerConfig(socket=path, **config),
            hear,
            max_sessions,
            max_memory_fds_of(LimitsConfig()),
            Turns(),
        )
        workers.start()
        found = Listening(workers, path, received)
        try:
            yield found
        finally:
            for connection in found.opened:
                connection.close()
            workers.stop()
            await asyncio.sleep(0)


def register(num_descriptors: int = 0) -> wk.Register:
    regions = tuple(wk.RegionExport(r.region, r.size_bytes) for r in LAYOUT.regions)
    return wk.Register(
        request=1,
        engine=SPEC,
        layout=LAYOUT,
        regions=regions,
        incarnation="i",
        num_descriptors=num_descriptors,
    )
