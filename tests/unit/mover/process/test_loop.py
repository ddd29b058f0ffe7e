"""The mover's loop: how a rank's pulls are to read, and what it does although peers read all the time."""

from __future__ import annotations

import os
import socket
import time

import pytest

from kvxferd.frame_socket import FrameSocket, dup_fds
from kvxferd.ids import AgentName, RegionId
from kvxferd.memory import SealedMemory
from kvxferd.mover.chunks import chunk_pool
from kvxferd.mover.chunks.chunk_pool import ChunkState
from kvxferd.mover.process import backoff
from kvxferd.mover.process.backoff import PollBackoff
from kvxferd.mover.process.child_main import MoverCount
from kvxferd.mover.process.loop import MoverLoop
from kvxferd.wire.codec import encode
from kvxferd.wire.mover import Bind, ReadWay
from kvxferd.wire.worker import RegionExport
from tests.support.memory_transport import Fabric, MemoryTransport


def test_idle_chunks_are_given_back_by_a_mover_that_polls_for_its_readers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunk_pool, "IDLE_S", 0.0)
    ours, theirs = socket.socketpair()
    daemon, stream = FrameSocket(ours), FrameSocket(theirs)
    transport = MemoryTransport(Fabric(), AgentName("a"))
    backoff = PollBackoff(lambda: False)
    loop = MoverLoop(stream, transport, backoff, os.close)
    pool = loop._chunks
    pool.set_grant(1, time.perf_counter())
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


@pytest.mark.parametrize("read_way", list(ReadWay))
def test_a_rank_is_bound_with_the_way_in_which_its_pulls_read(read_way: ReadWay) -> None:
    ours, theirs = socket.socketpair()
    daemon, stream = FrameSocket(ours), FrameSocket(theirs)
    transport = MemoryTransport(Fabric(), AgentName("a"))
    loop = MoverLoop(stream, transport, PollBackoff(lambda: False), os.close)
    region = RegionExport(region=RegionId("kv"), size_bytes=4096, fd_index=0)
    with SealedMemory.create(4096) as memory, socket.socket() as deliveries:
        worker = os.pidfd_open(os.getpid())
        fds = dup_fds([memory.fd, deliveries.fileno(), worker])
        daemon.send(encode(Bind(regions=(region,), read_way=read_way)), fds)
        daemon.flush()
        os.close(worker)
        assert not loop._receive()
    engine = loop._engine
    assert engine._covering.is_available == (read_way is not ReadWay.DIRECT)
    assert engine._always_covers == (read_way is ReadWay.COVERING)
    transport.close()
    loop.close()
    stream.close()
    daemon.close()


# --- how long a mover waits, and what it knows of its neighbours


def after(pacer: PollBackoff, idle_s: float, is_reading: bool) -> float:
    """Return its pause so long after something happened, by a clock that stands still meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: pacer._progress_at + idle_s)
        return pacer.pause_s(is_reading)


@pytest.mark.parametrize("crowded", [False, True])
def test_it_looks_again_at_once_after_something_happened(crowded: bool) -> None:
    pacer = PollBackoff(lambda: crowded)
    pacer.reset()
    assert after(pacer, 0.0, True) == 0.0
    assert after(pacer, 100e-6, False) == backoff.MIN_PAUSE_S


def test_it_spins_for_a_shorter_time_in_a_crowd() -> None:
    idle_s = (backoff.SPIN_OVERSUBSCRIBED_S + backoff.SPIN_S) / 2
    assert after(PollBackoff(lambda: True), idle_s, True) == backoff.MIN_PAUSE_S
    assert after(PollBackoff(lambda: False), 0.0, True) == 0.0


def test_pauses_grow_up_to_a_limit() -> None:
    pacer = PollBackoff(lambda: False)
    pauses = [after(pacer, idle, True) for idle in (0.0003, 0.001, 0.002, 0.1, 10.0)]
    assert pauses == sorted(pauses)
    assert pauses[0] == backoff.MIN_PAUSE_S
    assert pauses[-1] == backoff.MAX_READING_PAUSE_S
    assert after(pacer, 0.5, False) == backoff.MAX_SERVING_PAUSE_S
    assert after(pacer, 5.0, False) == backoff.MAX_IDLE_PAUSE_S


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
