"""The daemon's end of a mover: one that sends without end, does not read, or sends what cannot be."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvxferd.errors import ProtocolError
from kvxferd.frame_socket import FrameSocket, dup_fds
from kvxferd.frame_stream import MAX_FRAMES_PER_TURN, MAX_UNSENT_BYTES
from kvxferd.ids import AgentName, GroupName, MoverId
from kvxferd.mover.supervisor.forkserver_client import _stderr_pipe
from kvxferd.mover.supervisor.handle import MoverHandle, ResidentHandle
from kvxferd.mover.supervisor.processes import MoverProcesses
from kvxferd.wire.codec import encode
from kvxferd.wire.common import BlockIds
from kvxferd.wire.limits import MAX_FDS_PER_FRAME, MAX_FRAME_BYTES
from kvxferd.wire.mover import FromMover, Polling
from tests.support.open_fds import num_open_fds

NUM_MESSAGES = 5000
BLOCK_IDS = BlockIds(stream=1, group=GroupName("g"), offset=0, ids=bytes(3 << 20))


class Resident:
    """A resident mover's stream, and the daemon's handle of it."""

    def __init__(self) -> None:
        self.received: list[FromMover] = []
        self.ended = asyncio.Event()
        self.reply: BlockIds | None = None  # to each message
        ours, theirs = socket.socketpair()
        self.stream = FrameSocket(theirs)
        self.handle = ResidentHandle(
            MoverId(1), ours, (os.getpid(), -1), self._receive, lambda _: self.ended.set()
        )

    def _receive(self, handle: MoverHandle, message: FromMover) -> None:
        self.received.append(message)
        if self.reply is not None:
            handle.send(self.reply)

    def send(self, num_messages: int) -> None:
        for token in range(num_messages):
            self.stream.send(encode(Polling(token=token)))


async def test_a_turn_takes_some_of_its_messages() -> None:
    mover = Resident()
    mover.send(NUM_MESSAGES)
    most = 0
    async with asyncio.timeout(30):
        while len(mover.received) < NUM_MESSAGES:
            mover.stream.flush()
            before = len(mover.received)
            await asyncio.sleep(0)
            most = max(most, len(mover.received) - before)
        mover.stream.close()
        await mover.ended.wait()
    assert mover.received == [Polling(token=token) for token in range(NUM_MESSAGES)]
    assert most <= MAX_FRAMES_PER_TURN
    mover.handle.discard()


async def test_one_that_does_not_read_is_cut_off_and_its_rank_has_lost_it() -> None:
    mover = Resident()
    mover.reply = BLOCK_IDS
    async with asyncio.timeout(30):
        mover.send(NUM_MESSAGES)
        while not mover.handle._end_requested or not mover.stream.is_flushed:
            mover.stream.flush()
            await asyncio.sleep(0)
        assert 0 < len(mover.received) - MAX_UNSENT_BYTES // (3 << 20) <= MAX_FRAMES_PER_TURN
        mover.handle.send(BLOCK_IDS)
        assert mover.handle._stream.unsent_bytes == 0
        assert not mover.ended.is_set()  # its agent may still write
        while not mover.stream.discard_received():
            pass
        mover.stream.close()
        await mover.ended.wait()


async def test_a_daemon_that_stops_closes_the_streams_of_resident_movers() -> None:
    processes = MoverProcesses(lambda event: None)
    ours, theirs = socket.socketpair()
    processes.accept(MoverId(1), ours, (os.getpid(), -1))
    async with asyncio.timeout(30):
        await processes.stop()
    assert theirs.recv(1) == b""
    theirs.close()


# --- movers in processes of their own


class Child:
    """The daemon's handle of a mover, for which `cat` stands, and the mover's end of their stream."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        ours, self.theirs = socket.socketpair()
        self.handle = MoverHandle(
            MoverId(1), AgentName("a"), ours, lambda *_: None, lambda _: self.ended.set()
        )


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process


@pytest.mark.process
async def test_nonsense_of_a_mover_leaves_nothing_open(process: subprocess.Popen[bytes]) -> None:
    before = num_open_fds()
    mover = Child()
    stream = FrameSocket(mover.theirs)
    for payload in (encode(Polling(token=1)), b"nonsense", encode(Polling(token=2))):
        stream.send(payload, dup_fds([mover.theirs.fileno()] * 3))
    stream.flush()
    mover.handle.attach(process.pid, os.pidfd_open(process.pid))
    await asyncio.wait_for(mover.ended.wait(), 10)
    stream.close()
    await asyncio.sleep(0)
    assert num_open_fds() == before


@pytest.mark.process
async def test_a_mover_that_does_not_read_is_killed(process: subprocess.Popen[bytes]) -> None:
    before = num_open_fds()
    mover = Child()
    mover.handle.attach(process.pid, os.pidfd_open(process.pid))
    while mover.handle._stream.fileno() >= 0:
        mover.handle.send(BLOCK_IDS, [mover.theirs.fileno()] * (MAX_FDS_PER_FRAME + 1))
    await asyncio.wait_for(mover.ended.wait(), 10)
    mover.theirs.close()
    assert num_open_fds() == before


async def test_a_message_whose_descriptors_cannot_be_copied_is_not_sent_in_part() -> None:
    """Its parts would be taken for the beginning of the next message's."""
    mover = Child()
    before = num_open_fds()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + MAX_FDS_PER_FRAME + 20, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            mover.handle.send(Polling(token=1), [mover.theirs.fileno()] * (MAX_FDS_PER_FRAME + 100))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (mover.handle._stream.unsent_bytes, num_open_fds()) == (0, before)
    mover.handle.discard()
    mover.theirs.close()


async def test_a_frame_that_cannot_be_sent_has_its_descriptors_closed() -> None:
    mover = Resident()
    before = num_open_fds()
    with pytest.raises(ProtocolError):
        mover.stream.send(bytes(MAX_FRAME_BYTES + 1), dup_fds([mover.stream.fileno()]))
    assert num_open_fds() == before
    mover.stream.close()
    mover.handle.discard()


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
        subprocess.run([sys.executable, "-c", CODE], stdout=writing, stderr=writing, timeout=60, check=False)
        os.set_blocking(reading, False)
        assert os.read(reading, 4096).startswith(b"WARNING:root:line 0 ")
    finally:
        os.close(reading)
        os.close(writing)
