"""A worker's death ends its session, whoever else holds its socket: real forks, real sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvxferd import unix_socket
from kvxferd.config import WorkerConfig
from kvxferd.control.worker_socket import WorkerSocket
from kvxferd.core import events as ev

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


@asynccontextmanager
async def listening(path: Path) -> AsyncIterator[asyncio.Queue[ev.Event]]:
    heard: asyncio.Queue[ev.Event] = asyncio.Queue()
    workers = WorkerSocket(WorkerConfig(socket=str(path)), heard.put_nowait)
    workers.start()
    try:
        yield heard
    finally:
        workers.stop()
        await asyncio.sleep(0)


async def next_of(heard: asyncio.Queue[ev.Event]) -> ev.Event:
    return await asyncio.wait_for(heard.get(), WAIT_S)


@pytest.mark.process
async def test_a_forked_child_that_holds_the_socket_does_not_keep_the_session(tmp_path: Path):
    async with listening(tmp_path / "w.sock") as heard:
        held, holds = os.pipe()
        command = (sys.executable, "-c", FORKED, str(tmp_path / "w.sock"), "00")
        worker = await asyncio.create_subprocess_exec(*command, stdin=held)
        os.close(held)
        try:
            opened = await next_of(heard)
            assert isinstance(opened, ev.WorkerConnected)
            assert await next_of(heard) == ev.WorkerDisconnected(opened.session)
        finally:
            os.close(holds)
            await worker.wait()


def test_who_is_dead_already_is_not_taken(monkeypatch: pytest.MonkeyPatch):
    """A kernel without SO_PEERPIDFD knows only the number of a process, which nobody may have any more."""
    monkeypatch.setattr(unix_socket, "_SO_PEERPIDFD", 9999)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ProcessLookupError):
        unix_socket.open_exit_fds(ours, 2**22 + 1)  # above what the kernel gives out
