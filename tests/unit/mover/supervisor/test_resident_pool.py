"""A resident mover that sends without end: it is heard whole, in order, and in turns."""

from __future__ import annotations

import asyncio
import os
import socket

from kvxferd.frame_socket import FrameSocket
from kvxferd.ids import MoverId
from kvxferd.mover.supervisor.resident_pool import MAX_FRAMES_PER_TURN, ResidentHandle
from kvxferd.wire.codec import encode
from kvxferd.wire.mover import FromMover, Polling

NUM_MESSAGES = 5000


async def test_a_turn_takes_some_of_its_messages():
    heard: list[FromMover] = []
    ended = asyncio.Event()
    ours, theirs = socket.socketpair()
    handle = ResidentHandle(
        MoverId(1), ours, (os.getpid(), -1), lambda _, message: heard.append(message), lambda _: ended.set()
    )
    link = FrameSocket(theirs)
    for token in range(NUM_MESSAGES):
        link.send(encode(Polling(token=token)))
    most = 0
    async with asyncio.timeout(30):
        while len(heard) < NUM_MESSAGES:
            link.flush()
            before = len(heard)
            await asyncio.sleep(0)
            most = max(most, len(heard) - before)
        assert link.is_flushed
        link.close()
        await ended.wait()
    assert heard == [Polling(token=token) for token in range(NUM_MESSAGES)]
    assert most <= 2 * MAX_FRAMES_PER_TURN  # once because more has arrived, once because some are left
    handle.discard()
