"""The mover's loop: what it does although peers read from here all the time."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Iterator

import pytest

from kvxferd.frame_socket import FrameSocket, dup_fds
from kvxferd.ids import AgentName, GroupName, RegionId
from kvxferd.layout.areas import BlockArea
from kvxferd.memory import SealedMemory
from kvxferd.mover.process import chunks as chunk_pool
from kvxferd.mover.process.backoff import PollBackoff
from kvxferd.mover.process.chunks import ChunkState
from kvxferd.mover.process.loop import MoverLoop
from kvxferd.mover.read_ways import ReadWay
from kvxferd.mover.transport.base import Span
from kvxferd.wire.codec import FROM_MOVER, encode
from kvxferd.wire.common import Message
from kvxferd.wire.limits import CHUNK_BYTES
from kvxferd.wire.mover import Bind, Bound, ChunkMemoryGranted, GrantBlocks, LoadRemote, SetPolling
from kvxferd.wire.staging import GatherPattern, GatherReady, GatherRequest, decode_staging_message
from kvxferd.wire.worker import RegionExport
from tests.support.memory_transport import Fabric, MemoryTransport
from tests.support.mover_harness import packed


def test_idle_chunks_are_given_back_by_a_mover_that_polls_for_its_readers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunk_pool, "IDLE_S", 0.0)
    ours, theirs = socket.socketpair()
    daemon, stream = FrameSocket(ours), FrameSocket(theirs)
    transport = MemoryTransport(Fabric(), AgentName("a"))
    backoff = PollBackoff(lambda: False)
    loop = MoverLoop(stream, transport, backoff, os.close, read_way=ReadWay.COVERING)
    covering = loop._engine._covering
    assert covering is not None
    pool = covering._chunks
    pool.set_grant(CHUNK_BYTES)
    chunk = pool.acquire(AgentName("b"), time.perf_counter(), is_wanted_elsewhere=False)
    assert chunk is not None
    pool.move(chunk, ChunkState.FREE, time.perf_counter())
    loop._is_polling = True
    loop._work()
    assert pool.num_bytes == 0
    transport.close()
    loop.close()
    stream.close()
    daemon.close()


class Source:
    """A mover's loop in this process, and its daemon's end of the stream."""

    def __init__(self, read_way: ReadWay) -> None:
        ours, theirs = socket.socketpair()
        self.daemon, self.stream = FrameSocket(ours), FrameSocket(theirs)
        self.fabric = Fabric()
        self.transport = MemoryTransport(self.fabric, AgentName("a"))
        self.loop = MoverLoop(
            self.stream, self.transport, PollBackoff(lambda: False), os.close, read_way=read_way
        )

    def send(self, message: Message, fds: list[int] | None = None) -> None:
        self.daemon.send(encode(message), dup_fds(fds or []))
        self.daemon.flush()

    def turn(self) -> None:
        """Do what the loop does once."""
        self.loop._work()
        while self.loop._engine.outbox:
            self.loop._report(self.loop._engine.outbox.popleft())
        self.stream.flush()
        if self.loop._wait():
            self.loop._receive()

    def replies(self) -> list[Message]:
        return [FROM_MOVER.decode(frame.payload) for frame in self.daemon.receive() or ()]

    def close(self) -> None:
        self.transport.close()
        self.loop.close()
        self.stream.close()
        self.daemon.close()


@pytest.fixture(params=[ReadWay.GATHERED, ReadWay.COVERING])
def source(request: pytest.FixtureRequest) -> Iterator[Source]:
    source = Source(request.param)
    yield source
    source.close()


def test_a_source_packs_though_the_request_was_there_before_the_grant_was_read(source: Source) -> None:
    gathers = source.loop._gather_source is not None
    with SealedMemory.create(1 << 16) as memory:
        content = os.urandom(1 << 16)
        os.pwrite(memory.fd, content, 0)
        bind = Bind(regions=(RegionExport(region=RegionId("kv"), size_bytes=1 << 16, fd_index=0),))
        worker = os.pidfd_open(os.getpid())
        source.send(bind, [memory.fd, worker])
        os.close(worker)
        source.send(ChunkMemoryGranted(size_bytes=2 * CHUNK_BYTES))
        source.send(SetPolling(token=1, on=True))
        source.turn()
        (bound,) = [one for one in source.replies() if isinstance(one, Bound)]
        assert bound.gathers == gathers
        reader = MemoryTransport(source.fabric, AgentName("b"))
        reader.load_remote(bound.metadata)
        slot = Span(4096, 64)
        reader.register(slot)
        start = (bound.regions[0].address + 5 * 1024).to_bytes(8, "little")
        word = os.urandom(16)
        request = GatherRequest(
            number=1,
            word=word,
            patterns=(GatherPattern(start, 100, 1, 0, 4, 256),),
            metadata=reader.metadata([slot]),
        )
        area = BlockArea(RegionId("kv"), GroupName("full"), 0, 1024, 1024, 1)
        reader.notify(AgentName("a"), encode(request))
        source.send(GrantBlocks(word=word, areas=(area,), blocks=packed([5])))
        for _ in range(5):
            source.turn()
        replies = [decode_staging_message(payload) for _, payload in reader.receive_notifications()]
        if not gathers:
            assert replies == []
            return
        (ready,) = replies
        assert isinstance(ready, GatherReady)
        assert source.transport.loaded == {AgentName("b")}
        other = Span(8192, 128)
        reader.register(other)
        source.send(LoadRemote(agent=AgentName("b"), metadata=reader.metadata([other])))
        source.turn()
        # What the agent named itself for replies is forgotten before it is read: it may be another's.
        assert source.transport._remote_spans == {AgentName("b"): {other}}
        found = ctypes.string_at(ready.address, 400)
        assert found == b"".join(content[at : at + 100] for at in range(5 * 1024, 6 * 1024, 256))
        assert ctypes.string_at(ready.stamp_address, 16) == ready.stamp
