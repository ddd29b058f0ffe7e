"""A TCP link that can be cut, stalled, made one-way or slow, and healed: the network between daemons."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from contextlib import suppress
from enum import Enum

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST


class Mode(Enum):
    """What the link does at this moment."""

    OPEN = "open"
    CUT = "cut"  # connections are reset, new ones too
    STALLED = "stalled"  # nothing passes, nothing is reset
    REQUESTS_LOST = "asking-lost"  # what the connecting side sends does not pass
    REPLIES_LOST = "answers-lost"  # what the listening side sends does not pass
    SLOW = "slow"  # a few bytes at a time


class Proxy:
    """Forwards a port of its own to another, on an event loop in a thread."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._mode = Mode.OPEN
        self._changed = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = "tcp://{}:{}".format(*listener.getsockname())
        self._loop = asyncio.new_event_loop()
        self._serving = self._loop.create_task(self._serve(listener))
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def set(self, mode: Mode) -> None:
        """Change the link; takes effect within milliseconds."""
        self._loop.call_soon_threadsafe(self._set, mode)

    def stop(self) -> None:
        """Cut it for good."""
        self.set(Mode.CUT)
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(5)

    # --- the thread

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serving)
        if left := asyncio.all_tasks(self._loop):  # of connections, which are cut
            self._loop.run_until_complete(asyncio.wait(left, timeout=1.0))
        self._loop.close()

    async def _serve(self, listener: socket.socket) -> None:
        async with await asyncio.start_server(self._accepted, sock=listener) as server:
            await server.serve_forever()

    def _set(self, mode: Mode) -> None:
        self._mode = mode
        self._changed.set()
        self._changed = asyncio.Event()
        if mode is Mode.CUT:
            for writer in list(self._writers):
                self._reset(writer)

    def _reset(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        with suppress(OSError):
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if self._mode is Mode.CUT:
                raise OSError("cut")
            far_reader, far_writer = await asyncio.wait_for(asyncio.open_connection(*self._target), 1.0)
        except OSError:
            self._reset(writer)
            return
        self._writers.add(far_writer)
        ways = ((reader, far_writer, Mode.REQUESTS_LOST), (far_reader, writer, Mode.REPLIES_LOST))
        done = [asyncio.ensure_future(self._forward(*way)) for way in ways]
        await asyncio.wait(done, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.cancel()
        for end in (writer, far_writer):
            self._reset(end)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lost: Mode) -> None:
        with suppress(OSError):
            while content := await reader.read(16 if self._mode is Mode.SLOW else 1 << 16):
                while self._mode in (Mode.STALLED, lost):
                    await self._changed.wait()
                if self._mode is Mode.SLOW:
                    await asyncio.sleep(0.005)
                writer.write(content)
                await writer.drain()
