"""A resident mover that sends without end: it is heard whole, in order, and in turns."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys

import pytest

from kvxferd.frame_socket import FrameSocket
from kvxferd.ids import MoverId
from kvxferd.mover.supervisor.forkserver_client import _stderr_pipe
from kvxferd.mover.supervisor.resident_pool import MAX_FRAMES_PER_TURN, ResidentHandle
from kvxferd.wire.codec import encode
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
    assert most <= 2 * MAX_FRAMES_PER_TURN  # once because more has arrived, once because some are left
    handle.discard()


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
