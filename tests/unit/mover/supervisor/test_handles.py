"""A resident mover that sends without end is heard in turns, and one that does not read is cut off."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys

import pytest

from kvxferd.frame_socket import FrameSocket
from kvxferd.frame_stream import MAX_FRAMES_PER_TURN, MAX_UNSENT_BYTES
from kvxferd.ids import GroupName, MoverId
from kvxferd.mover.supervisor.forkserver_client import _stderr_pipe
from kvxferd.mover.supervisor.handle import MoverHandle, ResidentHandle
from kvxferd.mover.supervisor.processes import MoverProcesses
from kvxferd.wire.codec import encode
from kvxferd.wire.common import BlockIds
from kvxferd.wire.mover import FromMover, Polling

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
    ended = asyncio.Event()
    reply_ids = BlockIds(stream=1, group=GroupName("g"), offset=0, ids=bytes(3 << 20))
    num_replies = 0

    def reply(handle: MoverHandle, message: FromMover) -> None:
        nonlocal num_replies
        num_replies += 1
        handle.send(reply_ids)

    ours, theirs = socket.socketpair()
    handle = ResidentHandle(MoverId(1), ours, (os.getpid(), -1), reply, lambda _: ended.set())
    link = FrameSocket(theirs)
    async with asyncio.timeout(30):
        for token in range(NUM_MESSAGES):
            link.send(encode(Polling(token=token)))
        while not handle._end_requested or not link.is_flushed:
            link.flush()
            await asyncio.sleep(0)
        assert 0 < num_replies - MAX_UNSENT_BYTES // (3 << 20) <= MAX_FRAMES_PER_TURN
        handle.send(reply_ids)
        assert handle._stream.unsent_bytes == 0
        assert not ended.is_set()  # its agent may still write
        while not link.discard_received():
            pass
        link.close()
        await ended.wait()


async def test_a_daemon_that_stops_closes_the_streams_of_resident_movers() -> None:
    processes = MoverProcesses(lambda event: None)
    ours, theirs = socket.socketpair()
    processes.accept(MoverId(1), ours, (os.getpid(), -1))
    async with asyncio.timeout(30):
        await processes.stop()
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
