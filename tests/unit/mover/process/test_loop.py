"""The mover's loop: how a rank is bound and read, what it closes, and how long it waits for what."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator

import pytest

from kvxferd.errors import Code, ProtocolError
from kvxferd.frame_socket import FrameSocket, dup_fds
from kvxferd.ids import AgentName, RegionId
from kvxferd.memory import SealedMemory
from kvxferd.mover.chunks import chunk_pool
from kvxferd.mover.chunks.chunk_pool import ChunkState
from kvxferd.mover.process import backoff
from kvxferd.mover.process.backoff import PollBackoff
from kvxferd.mover.process.child_main import MoverCount
from kvxferd.mover.process.loop import MoverLoop
from kvxferd.wire.codec import FROM_MOVER, encode
from kvxferd.wire.common import FdBatch
from kvxferd.wire.mover import Bind, BindRefused, Bound, FromMover, ReadWay
from kvxferd.wire.worker import RegionExport
from tests.support.memory_transport import Fabric, MemoryTransport


class Mover:
    """A loop that runs when the test lets it, and the daemon's end of its stream."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.daemon, self._stream = FrameSocket(ours), FrameSocket(theirs)
        self._transport = MemoryTransport(Fabric(), AgentName("a"))
        self.watched: list[int] = []  # pidfds of workers
        self.loop = MoverLoop(self._stream, self._transport, PollBackoff(lambda: False), self.watched.append)

    def bind(self, read_way: ReadWay = ReadWay.DIRECT) -> None:
        """Send `Bind` of a page; this process stands for the worker."""
        region = RegionExport(region=RegionId("kv"), size_bytes=4096, fd_index=0)
        with SealedMemory.create(4096) as memory, socket.socket() as deliveries:
            worker = os.pidfd_open(os.getpid())
            fds = dup_fds([memory.fd, deliveries.fileno(), worker])
            os.close(worker)
        self.daemon.send(encode(Bind(regions=(region,), read_way=read_way)), fds)
        self.daemon.flush()

    def replies(self) -> list[FromMover]:
        self._stream.flush()
        return [FROM_MOVER.decode(frame.payload) for frame in self.daemon.receive() or []]

    def close(self) -> None:
        self._transport.close()
        self.loop.close()
        self._stream.close()
        self.daemon.close()
        for pidfd in self.watched:
            os.close(pidfd)


@pytest.fixture
def mover() -> Iterator[Mover]:
    made = Mover()
    yield made
    made.close()


def test_a_mover_that_reads_nonsense_closes_all_that_came(mover: Mover) -> None:
    """Before it, with it and behind it: a resident mover's process goes on."""
    for first, count in ((0, 2), (5, 2), (2, 3)):  # the second leaves a gap
        mover.daemon.send(encode(FdBatch(first=first)), dup_fds([mover.daemon.fileno()] * count))
    mover.daemon.flush()
    with pytest.raises(ProtocolError):
        mover.loop.serve()


def test_a_bind_without_descriptors_binds_nothing_and_may_come_again(mover: Mover) -> None:
    """What watches the worker comes first: memory must not be bound in a mover that outlives its worker."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    mover.bind()
    # Room for the three that come, and for one copy of the two that are the worker's.
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free() + 3 + 1, limits[1]))
    try:
        assert not mover.loop._receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    (refused,) = mover.replies()
    assert isinstance(refused, BindRefused)
    assert (refused.code, mover.watched) == (Code.BUSY, [])
    mover.bind()
    assert not mover.loop._receive()
    assert isinstance(mover.replies()[0], Bound)
    assert len(mover.watched) == 1


def lowest_free() -> int:
    fd = os.dup(0)
    os.close(fd)
    return fd


def test_idle_chunks_are_given_back_by_a_mover_that_polls_for_its_readers(
    mover: Mover, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_pool, "IDLE_S", 0.0)
    pool = mover.loop._chunks
    pool.set_grant(1, time.perf_counter())
    chunk = pool.acquire(AgentName("b"), time.perf_counter(), is_wanted_elsewhere=False)
    assert chunk is not None
    pool.move(chunk, ChunkState.FREE, time.perf_counter())
    mover.loop._is_polling = True
    mover.loop._work()
    assert pool.num_bytes == 0


@pytest.mark.parametrize("read_way", list(ReadWay))
def test_a_rank_is_bound_with_the_way_in_which_its_pulls_read(mover: Mover, read_way: ReadWay) -> None:
    mover.bind(read_way)
    assert not mover.loop._receive()
    engine = mover.loop._engine
    assert engine._covering.is_available == (read_way is not ReadWay.DIRECT)
    assert engine._always_covers == (read_way is ReadWay.COVERING)


# --- how long a mover waits, and what it knows of its neighbours


@pytest.mark.parametrize(
    ("idle_s", "is_reading", "is_crowded", "pause_s"),
    [
        (0.0, True, False, 0.0),  # it looks again at once after something happened
        (0.0, True, True, 0.0),
        (20e-6, True, False, 0.0),  # and spins, for a shorter time in a crowd
        (20e-6, True, True, backoff.MIN_PAUSE_S),
        (100e-6, False, False, backoff.MIN_PAUSE_S),
        (0.002, True, False, 0.00025),  # pauses grow up to a limit
        (10.0, True, False, backoff.MAX_READING_PAUSE_S),
        (0.5, False, False, backoff.MAX_SERVING_PAUSE_S),
        (5.0, False, False, backoff.MAX_IDLE_PAUSE_S),
    ],
)
def test_a_mover_waits_the_longer_the_longer_nothing_has_happened(
    idle_s: float, is_reading: bool, is_crowded: bool, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    pacer = PollBackoff(lambda: is_crowded)
    now[0] += 7.0
    pacer.reset()
    now[0] += idle_s
    assert pacer.pause_s(is_reading) == pytest.approx(pause_s)


def test_a_crowd_is_counted_for_the_processes_forked_from_it() -> None:
    crowd = MoverCount(num_cores=2)
    assert not crowd.is_oversubscribed
    looks, tells = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tells)
        os.read(looks, 1)
        os._exit(0 if crowd.is_oversubscribed else 1)
    crowd.set(3)
    os.close(looks)
    os.close(tells)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    crowd.set(2)
    assert not crowd.is_oversubscribed
