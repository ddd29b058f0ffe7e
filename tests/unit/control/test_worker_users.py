"""Who may use the worker socket, and what becomes of those who never read: real processes, real sockets."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import sys

import pytest

from kvxferd import unix_socket
from kvxferd.control.worker_socket import WorkerSocket
from kvxferd.core import events as ev
from kvxferd.errors import Code
from kvxferd.wire import worker as wk
from kvxferd.wire.limits import MAX_FRAME_BYTES
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


async def knock(path: str, uid: int, gid: int, patience_s: float) -> str:
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
        patience_s = 0.3 if answer == "welcome" else 20.0  # who is refused is told, however late
        assert await knock(path, uid, gid, patience_s) == answer
        opened = [received.get_nowait() for _ in range(received.qsize())]
        assert [e.uid for e in opened if isinstance(e, ev.WorkerConnected)] == (
            [uid] if answer == "welcome" else []
        )


async def test_a_connection_too_many_is_told_so():
    async with listening(max_sessions=2) as found:
        first = [await found.connection() for _ in range(2)]
        for _ in first:
            await found.event(ev.WorkerConnected)
        farewell = await found.heard(await found.connection())
        assert (farewell.code, "limits.max_sessions" in farewell.message) == (Code.BUSY, True)
        first[0].close()
        await found.event(ev.WorkerDisconnected)
        await found.connection()
        await found.event(ev.WorkerConnected)


async def test_who_never_reads_is_disconnected_and_the_others_are_served():
    async with listening() as found:
        workers, received = found.workers, found.received
        deaf, other = await found.connection(), await found.connection()
        sessions = [(await found.event(ev.WorkerConnected)).session for _ in range(2)]
        for session, connection in zip(sessions, (deaf, other), strict=True):  # who is admitted may be slow
            workers.send(session, wk.Registered(request=1, endpoint="tcp://10.0.0.1:1"))
            assert await found.heard(connection)
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
        assert await found.heard(other) == event


async def test_a_message_too_long_for_a_frame_ends_the_session_it_is_for():
    async with listening() as found:
        await found.connection()
        session = (await found.event(ev.WorkerConnected)).session
        found.workers.send(session, wk.Farewell(code=Code.INTERNAL, message="x" * MAX_FRAME_BYTES))
        assert await found.event(ev.WorkerDisconnected) == ev.WorkerDisconnected(session)


async def test_without_descriptors_it_waits_and_does_not_spin(monkeypatch: pytest.MonkeyPatch):
    tried, num_accepts, accept = asyncio.Event(), 0, WorkerSocket._accept

    def accept_counted(workers: WorkerSocket) -> None:
        nonlocal num_accepts
        num_accepts += 1
        tried.set()
        accept(workers)

    monkeypatch.setattr(WorkerSocket, "_accept", accept_counted)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with listening() as found:
        await found.connection()
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            await asyncio.wait_for(tried.wait(), 20)
            for _ in range(50):
                await asyncio.sleep(0)  # turns of the loop in which it could try again
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await found.event(ev.WorkerConnected)
    assert num_accepts <= 3


# --- A worker's death ends its session, whoever else holds its socket: real forks, real sockets


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


@pytest.mark.process
async def test_a_forked_child_that_holds_the_socket_does_not_keep_the_session():
    async with listening() as found:
        held, holds = os.pipe()
        command = (sys.executable, "-c", FORKED, found.path, "00")
        worker = await asyncio.create_subprocess_exec(*command, stdin=held)
        os.close(held)
        try:
            opened = await found.event(ev.WorkerConnected)
            assert await found.event(ev.WorkerDisconnected) == ev.WorkerDisconnected(opened.session)
        finally:
            os.close(holds)
            await worker.wait()


def test_who_is_dead_already_is_not_taken(monkeypatch: pytest.MonkeyPatch):
    """A kernel without SO_PEERPIDFD knows only the number of a process, which nobody may have any more."""
    monkeypatch.setattr(unix_socket, "_SO_PEERPIDFD", 9999)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ProcessLookupError):
        unix_socket.open_exit_fds(ours, 2**22 + 1)  # above what the kernel gives out
