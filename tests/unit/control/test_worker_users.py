"""Who may use the worker socket, and what becomes of those who never read: real processes, real sockets."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvxferd.config import WorkerConfig
from kvxferd.control.worker_socket import WorkerSocket
from kvxferd.core import events as ev
from kvxferd.errors import Code
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import DAEMON_MESSAGES, encode
from kvxferd.wire.framing import HEADER, FrameDecoder, encode_frame
from tests.support.other_user import NOBODY, needs_root, open_directory, script

# Connects, and prints what the socket says: nothing within a moment, or the farewell's code.
KNOCK = """
knocker = socket.socket(socket.AF_UNIX)
try:
    knocker.connect(sys.argv[1])
except PermissionError:
    print("mode")
    sys.exit()
knocker.settimeout(float(sys.argv[2]))
try:
    said = knocker.recv(65536)
except TimeoutError:
    print("welcome")
else:
    print(DAEMON_MESSAGES.decode(said[HEADER.size:]).code)
"""
IMPORTS = (
    "from kvxferd.wire.codec import DAEMON_MESSAGES\nfrom kvxferd.wire.framing import HEADER, encode_frame"
)


@asynccontextmanager
async def listening(
    max_sessions: int = 8, **config
) -> AsyncIterator[tuple[WorkerSocket, str, asyncio.Queue]]:
    heard: asyncio.Queue[ev.Event] = asyncio.Queue()
    with open_directory() as directory:
        path = str(directory / "worker.sock")
        workers = WorkerSocket(WorkerConfig(socket=path, **config), heard.put_nowait, max_sessions)
        workers.start()
        try:
            yield workers, path, heard
        finally:
            workers.stop()
            await asyncio.sleep(0)


async def knock(path: str, uid: int, gid: int, patience_s: float = 0.3) -> str:
    process = await asyncio.create_subprocess_exec(
        *script(KNOCK, uid, gid, IMPORTS), path, str(patience_s), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 30)
    return out.decode().strip()


@pytest.mark.process
@needs_root
@pytest.mark.parametrize(
    ("config", "uid", "gid", "answer"),
    [
        ({}, NOBODY, NOBODY, "mode"),  # 0660: not its user, not its group
        ({}, NOBODY, 0, "welcome"),  # of the socket's group
        ({"mode": 0o666}, NOBODY, NOBODY, "welcome"),
        ({"mode": 0o666, "allowed_uids": (1234,)}, NOBODY, NOBODY, "not-allowed"),
        ({"mode": 0o666, "allowed_uids": (1234,)}, 1234, NOBODY, "welcome"),
        ({"mode": 0o666, "allowed_gids": (4321,)}, NOBODY, 4321, "welcome"),
        ({"mode": 0o666, "allowed_gids": (4321,)}, NOBODY, NOBODY, "not-allowed"),
        ({"mode": 0o666, "allowed_uids": (1234,)}, 0, 0, "welcome"),  # root, whatever the lists say
    ],
)
async def test_users_and_groups(config, uid, gid, answer):
    async with listening(**config) as (_, path, heard):
        assert await knock(path, uid, gid) == answer
        opened = [heard.get_nowait() for _ in range(heard.qsize())]
        assert [e.uid for e in opened if isinstance(e, ev.WorkerConnected)] == (
            [uid] if answer == "welcome" else []
        )


async def test_a_connection_too_many_is_told_so():
    async with listening(max_sessions=2) as (_, path, heard):
        first = [await connect(path) for _ in range(2)]
        for _ in first:
            assert isinstance(await asyncio.wait_for(heard.get(), 20), ev.WorkerConnected)
        third = await connect(path)
        farewell = DAEMON_MESSAGES.decode((await receive(third))[HEADER.size :])
        assert (farewell.code, "limits.max_sessions" in farewell.message) == (Code.BUSY, True)
        first[0].close()
        assert isinstance(await asyncio.wait_for(heard.get(), 20), ev.WorkerDisconnected)
        await connect(path)
        assert isinstance(await asyncio.wait_for(heard.get(), 20), ev.WorkerConnected)


async def test_who_never_reads_is_disconnected_and_the_others_are_served():
    async with listening() as (workers, path, heard):
        deaf, other = await connect(path), await connect(path)
        sessions = [(await asyncio.wait_for(heard.get(), 20)).session for _ in range(2)]
        for session, connection in zip(sessions, (deaf, other), strict=True):  # who is admitted may be slow
            workers.send(session, wk.Registered(request=1, endpoint="tcp://10.0.0.1:1"))
            assert await receive(connection)
        # 4 KiB each: past the socket's buffer they are kept, and 32 MiB of them are enough.
        event = wk.PublishRefused(transfer_id="t", code=Code.INTERNAL, message="x" * 4000)
        num_sent = 0
        while not heard.qsize():
            workers.send(sessions[0], event)
            num_sent += 1
            assert num_sent < 20_000
        assert num_sent * 4096 > 16 << 20
        assert heard.get_nowait() == ev.WorkerDisconnected(sessions[0])
        workers.send(sessions[0], event)  # who is gone gets nothing
        workers.send(sessions[1], event)
        (frame,) = FrameDecoder().feed(await receive(other))
        assert DAEMON_MESSAGES.decode(frame.payload) == event
        deaf.close()


async def connect(path: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    await asyncio.get_running_loop().sock_connect(made, path)
    return made


async def receive(connection: socket.socket) -> bytes:
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(connection, 1 << 20), 20)


async def test_the_credentials_are_the_kernels_word():
    async with listening() as (_, path, heard):
        mine = await connect(path)
        opened = await asyncio.wait_for(heard.get(), 20)
        assert (opened.pid, opened.uid) == (os.getpid(), os.geteuid())
        mine.send(encode_frame(encode(wk.Hello(versions=wk.WORKER_VERSIONS, client="x")), 0))
        said = await asyncio.wait_for(heard.get(), 20)
        assert isinstance(said.message, wk.Hello)
