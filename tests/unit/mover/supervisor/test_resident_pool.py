"""A resident mover that sends without end is heard in turns, and one that does not read is cut off."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import sys

import pytest

from kvxferd.errors import Code, MoverError
from kvxferd.frame_socket import FrameSocket
from kvxferd.frame_stream import MAX_FRAMES_PER_TURN, MAX_UNSENT_BYTES
from kvxferd.ids import AgentName, BootId, GroupName, MoverId
from kvxferd.mover.supervisor import resident_pool
from kvxferd.mover.supervisor.forkserver_client import _stderr_pipe
from kvxferd.mover.supervisor.resident_pool import ResidentHandle, ResidentPool
from kvxferd.wire.codec import encode
from kvxferd.wire.common import BlockIds
from kvxferd.wire.mover import FromMover, MoverUp, Polling

NUM_MESSAGES = 5000


async def test_a_turn_takes_some_of_its_messages():
    received: list[FromMover] = []
    ended = asyncio.Event()
    ours, theirs = socket.socketpair()
    handle = ResidentHandle(
        MoverId(1),
        ours,
        (os.getpid(), -1),
        lambda _, message: received.append(message),
        lambda _: ended.set(),
    )
    link = FrameSocket(theirs)
    for token in range(NUM_MESSAGES):
        link.send(encode(Polling(token=token)))
    most = 0
    async with asyncio.timeout(30):
        while len(received) < NUM_MESSAGES:
            link.flush()
            before = len(received)
            await asyncio.sleep(0)
            most = max(most, len(received) - before)
        assert link.is_flushed
        link.close()
        await ended.wait()
    assert received == [Polling(token=token) for token in range(NUM_MESSAGES)]
    assert most <= MAX_FRAMES_PER_TURN
    handle.discard()


async def test_one_that_does_not_read_is_cut_off_and_its_rank_has_lost_it() -> None:
    got: asyncio.Queue[object] = asyncio.Queue()
    reply_ids = BlockIds(stream=1, group=GroupName("g"), offset=0, ids=bytes(3 << 20))
    num_replies = 0

    def reply(mover: MoverId, message: FromMover) -> None:
        nonlocal num_replies
        num_replies += 1
        handle.send(reply_ids)

    pool = ResidentPool(
        boot=BootId("here"),
        mover_ids=itertools.count(1),
        is_name_used=lambda agent: False,
        on_message=reply,
        on_exit=got.put_nowait,
    )
    ours, theirs = socket.socketpair()
    link = FrameSocket(theirs)
    pool.accept(ours, (os.getpid(), -1), got.put_nowait)
    link.send(encode(MoverUp(agent=AgentName("here/1"), library="nixl", pid=os.getpid())))
    link.flush()
    async with asyncio.timeout(30):
        handle = await got.get()
        assert isinstance(handle, ResidentHandle)
        for token in range(NUM_MESSAGES):
            link.send(encode(Polling(token=token)))
        while handle.is_alive or not link.is_flushed:
            link.flush()
            await asyncio.sleep(0)
        assert 0 < num_replies - MAX_UNSENT_BYTES // (3 << 20) <= MAX_FRAMES_PER_TURN
        handle.send(reply_ids)
        assert handle._stream.unsent_bytes == 0
        assert got.empty()  # its agent may still write
        while not link.discard_received():
            pass
        link.close()
        assert await got.get() == handle.mover_id


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("here/free", None),
        ("here/used", Code.OUT_OF_PLACE),
        ("elsewhere/free", Code.OUT_OF_PLACE),
        ("", Code.MOVER_LOST),  # it ends before its agent is made
        ("late", Code.MOVER_LOST),
    ],
)
async def test_one_is_accepted_with_an_agent_of_its_own_in_time(
    monkeypatch: pytest.MonkeyPatch, name: str, code: Code | None
) -> None:
    got: asyncio.Queue[object] = asyncio.Queue()
    if name == "late":
        monkeypatch.setattr(resident_pool, "UP_TIMEOUT_S", 0.01)
    pool = ResidentPool(
        boot=BootId("here"),
        mover_ids=itertools.count(1),
        is_name_used=lambda agent: agent == "here/used",
        on_message=lambda mover, message: got.put_nowait(message),
        on_exit=got.put_nowait,
    )
    ours, theirs = socket.socketpair()
    pool.accept(ours, (os.getpid(), -1), got.put_nowait)
    link = FrameSocket(theirs)
    if not name:
        link.close()
    elif name != "late":
        link.send(encode(MoverUp(agent=AgentName(name), library="nixl", pid=os.getpid())))
        link.flush()
    async with asyncio.timeout(30):
        result = await got.get()
        if code is None:
            assert isinstance(result, ResidentHandle)
            link.close()
            assert await got.get() == result.mover_id
        else:
            assert isinstance(result, MoverError)
            assert result.code is code
            assert ours.fileno() < 0
    pool.close()
    link.close()
    assert got.empty()


async def test_a_daemon_that_stops_refuses_those_that_start() -> None:
    results: list[object] = []
    pool = ResidentPool(
        boot=BootId("here"),
        mover_ids=itertools.count(1),
        is_name_used=lambda agent: False,
        on_message=lambda mover, message: None,
        on_exit=results.append,
    )
    ours, theirs = socket.socketpair()
    pool.accept(ours, (os.getpid(), -1), results.append)
    pool.close()
    assert [type(result) for result in results] == [MoverError]
    assert theirs.recv(1) == b""
    theirs.close()


# --- what the movers' parent and its movers write to standard error


CODE = """
import logging, os, sys

logging.basicConfig(stream=sys.stderr)
for number in range(40_000):
    logging.warning("line %d %s", number, "x" * 100)
raise RuntimeError("lost")
"""


@pytest.mark.process
def test_a_mover_loses_lines_rather_than_wait_for_a_daemon_that_is_stopped() -> None:
    reading, writing = _stderr_pipe()
    try:
        process = subprocess.Popen([sys.executable, "-c", CODE], stdout=writing, stderr=writing)
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()
        os.set_blocking(reading, False)
        assert os.read(reading, 4096).startswith(b"WARNING:root:line 0 ")
    finally:
        os.close(reading)
        os.close(writing)
