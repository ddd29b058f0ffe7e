"""What comes with frames that a mover, or the daemon's end of one, cannot take: all of it is closed."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from kvxferd.errors import Code, ProtocolError
from kvxferd.frame_socket import FrameSocket, dup_fds
from kvxferd.ids import AgentName, GroupName, MoverId, RegionId
from kvxferd.memory import SealedMemory
from kvxferd.mover.process.backoff import PollBackoff
from kvxferd.mover.process.loop import MoverLoop
from kvxferd.mover.supervisor.handle import MoverHandle
from kvxferd.wire.codec import encode
from kvxferd.wire.common import BlockIds, FdBatch
from kvxferd.wire.framing import Frame
from kvxferd.wire.limits import MAX_FDS_PER_FRAME, MAX_FRAME_BYTES
from kvxferd.wire.mover import Bind, Bound, Polling
from kvxferd.wire.worker import RegionExport
from tests.support.memory_transport import Fabric, MemoryTransport
from tests.support.open_fds import num_open_fds


def test_a_mover_that_reads_nonsense_closes_all_that_came() -> None:
    """Before it, with it and behind it: a resident mover's process goes on."""
    before = num_open_fds()
    ours, theirs = socket.socketpair()
    daemon, stream = FrameSocket(ours), FrameSocket(theirs)
    for first, count in ((0, 2), (5, 2), (2, 3)):  # the second leaves a gap
        daemon.send(encode(FdBatch(first=first)), dup_fds([ours.fileno()] * count))
    daemon.flush()
    transport = MemoryTransport(Fabric(), AgentName("a"))
    mover = MoverLoop(stream, transport, PollBackoff(lambda: False), os.close)
    with pytest.raises(ProtocolError):
        mover.serve()
    transport.close()
    mover.close()
    stream.close()
    daemon.close()
    assert num_open_fds() == before


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process


@pytest.mark.process
async def test_nonsense_of_a_mover_leaves_nothing_open(process: subprocess.Popen[bytes]) -> None:
    ended = asyncio.Event()
    before = num_open_fds()
    ours, theirs = socket.socketpair()
    handle = MoverHandle(MoverId(1), AgentName("a"), ours, lambda *_: None, lambda _: ended.set())
    link = FrameSocket(theirs)
    for payload in (encode(Polling(token=1)), b"nonsense", encode(Polling(token=2))):
        link.send(payload, dup_fds([theirs.fileno()] * 3))
    link.flush()
    handle.attach(process.pid, os.pidfd_open(process.pid))
    await asyncio.wait_for(ended.wait(), 10)
    link.close()
    await asyncio.sleep(0)
    assert num_open_fds() == before


@pytest.mark.process
async def test_a_mover_that_does_not_read_is_killed(process: subprocess.Popen[bytes]) -> None:
    ended = asyncio.Event()
    before = num_open_fds()
    ours, theirs = socket.socketpair()
    handle = MoverHandle(MoverId(1), AgentName("a"), ours, lambda *_: None, lambda _: ended.set())
    handle.attach(process.pid, os.pidfd_open(process.pid))
    part = BlockIds(stream=1, group=GroupName("g"), offset=0, ids=bytes(3 << 20))
    while handle._stream.fileno() >= 0:
        handle.send(part, [theirs.fileno()] * (MAX_FDS_PER_FRAME + 1))
    await asyncio.wait_for(ended.wait(), 10)
    theirs.close()
    assert num_open_fds() == before


async def test_a_message_whose_descriptors_cannot_be_copied_is_not_sent_in_part() -> None:
    """Its parts would be taken for the beginning of the next message's."""
    ours, theirs = socket.socketpair()
    handle = MoverHandle(MoverId(1), AgentName("a"), ours, lambda *_: None, lambda _: None)
    before = num_open_fds()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + MAX_FDS_PER_FRAME + 20, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            handle.send(Polling(token=1), [theirs.fileno()] * (MAX_FDS_PER_FRAME + 100))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (handle._stream.unsent_bytes, num_open_fds()) == (0, before)
    handle.discard()
    theirs.close()


def test_a_frame_that_cannot_be_sent_has_its_descriptors_closed() -> None:
    ours, theirs = socket.socketpair()
    link = FrameSocket(ours)
    before = num_open_fds()
    with pytest.raises(ProtocolError):
        link.send(bytes(MAX_FRAME_BYTES + 1), dup_fds([theirs.fileno()]))
    assert num_open_fds() == before
    link.close()
    theirs.close()


def test_a_bind_without_descriptors_binds_nothing_and_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What watches the worker comes first: memory must not be bound in a mover that outlives its worker."""
    before = num_open_fds()
    ours, theirs = socket.socketpair()
    daemon, stream = FrameSocket(ours), FrameSocket(theirs)
    transport, watched = MemoryTransport(Fabric(), AgentName("a")), []
    mover = MoverLoop(stream, transport, PollBackoff(lambda: False), watched.append)
    replies: list[Any] = []
    with SealedMemory.create(4096) as memory, socket.socket() as deliveries:
        bind = Bind(regions=(RegionExport(region=RegionId("r"), size_bytes=4096, fd_index=0),))
        monkeypatch.setattr(mover, "_send", replies.append)
        frame = Frame(encode(bind), (memory.fd, deliveries.fileno(), os.pidfd_open(os.getpid())))
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        # Room for one copy of the two.
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free() + 1, limits[1]))
        try:
            mover._handle(frame)
            mover._send_bind_reply()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert (replies[0].code, watched) == (Code.BUSY, [])
        mover._handle(frame)
        mover._send_bind_reply()
        assert isinstance(replies[1], Bound)
        os.close(frame.fds[2])
    transport.close()
    mover.close()
    stream.close()
    daemon.close()
    os.close(*watched)
    assert num_open_fds() == before


def lowest_free() -> int:
    fd = os.dup(0)
    os.close(fd)
    return fd
