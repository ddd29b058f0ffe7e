"""Who may use the worker socket, and what becomes of those who never read: real processes, real sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import pytest

from kvxferd import unix_socket
from kvxferd.core import events as ev
from kvxferd.errors import Code
from kvxferd.wire import worker as wk
from kvxferd.wire.codec import DAEMON_MESSAGES
from kvxferd.wire.framing import HEADER, FrameDecoder
from tests.support.other_user import NOBODY, needs_root, script
from tests.support.worker_socket_harness import listening

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
    async with listening(**config) as found:
        path, received = found.path, found.received
        assert await knock(path, uid, gid) == answer
        opened = [received.get_nowait() for _ in range(received.qsize())]
        assert [e.uid for e in opened if isinstance(e, ev.WorkerConnected)] == (
            [uid] if answer == "welcome" else []
        )


async def test_a_connection_too_many_is_told_so():
    async with listening(max_sessions=2) as found:
        path, received = found.path, found.received
        first = [await connect(path) for _ in range(2)]
        for _ in first:
            assert isinstance(await asyncio.wait_for(received.get(), 20), ev.WorkerConnected)
        third = await connect(path)
        farewell = DAEMON_MESSAGES.decode((await receive(third))[HEADER.size :])
        assert (farewell.code, "limits.max_sessions" in farewell.message) == (Code.BUSY, True)
        first[0].close()
        assert isinstance(await asyncio.wait_for(received.get(), 20), ev.WorkerDisconnected)
        await connect(path)
        assert isinstance(await asyncio.wait_for(received.get(), 20), ev.WorkerConnected)


async def test_who_never_reads_is_disconnected_and_the_others_are_served():
    async with listening() as found:
        workers, path, received = found.workers, found.path, found.received
        deaf, other = await connect(path), await connect(path)
        sessions = [(await asyncio.wait_for(received.get(), 20)).session for _ in range(2)]
        for session, connection in zip(sessions, (deaf, other), strict=True):  # who is admitted may be slow
            workers.send(session, wk.Registered(request=1, endpoint="tcp://10.0.0.1:1"))
            assert await receive(connection)
        # 4 KiB each: past the socket's buffer they are kept, and 32 MiB of them are enough.
        event = wk.PublishRefused(transfer_id="t", code=Code.INTERNAL, message="x" * 4000)
        num_sent = 0
        while not received.qsize():
            workers.send(sessions[0], event)
            num_sent += 1
            assert num_sent < 20_000
        assert num_sent * 4096 > 16 << 20
        assert received.get_nowait() == ev.WorkerDisconnected(sessions[0])
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


# --- A worker's death ends its session, whoever else holds its socket: real forks, real sockets


WAIT_S = 10.0

# Connects and forks. The child keeps the socket until its standard input ends; the parent says a last
# word and is gone.
FORKED = """
import os, socket, sys
connected = socket.socket(socket.AF_UNIX)
connected.connect(sys.argv[1])
if os.fork():
    connected.send(bytes.fromhex(sys.argv[2]))
    os._exit(0)
sys.stdin.read()
"""


async def next_of(received: asyncio.Queue[ev.Event]) -> ev.Event:
    return await asyncio.wait_for(received.get(), WAIT_S)


@pytest.mark.process
async def test_a_forked_child_that_holds_the_socket_does_not_keep_the_session():
    async with listening() as found:
        received = found.received
        held, holds = os.pipe()
        command = (sys.executable, "-c", FORKED, found.path, "00")
        worker = await asyncio.create_subprocess_exec(*command, stdin=held)
        os.close(held)
        try:
            opened = await next_of(received)
            assert isinstance(opened, ev.WorkerConnected)
            assert await next_of(received) == ev.WorkerDisconnected(opened.session)
        finally:
            os.close(holds)
            await worker.wait()


def test_who_is_dead_already_is_not_taken(monkeypatch: pytest.MonkeyPatch):
    """A kernel without SO_PEERPIDFD knows only the number of a process, which nobody may have any more."""
    monkeypatch.setattr(unix_socket, "_SO_PEERPIDFD", 9999)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ProcessLookupError):
        unix_socket.open_exit_fds(ours, 2**22 + 1)  # above what the kernel gives out
