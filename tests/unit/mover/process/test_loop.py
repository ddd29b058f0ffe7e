"""The mover's loop: what it does although peers read from here all the time."""

from __future__ import annotations

import os
import socket
import time

import pytest

from kvxferd.frame_socket import FrameSocket
from kvxferd.ids import AgentName
from kvxferd.mover.process import chunks as chunk_pool
from kvxferd.mover.process.backoff import PollBackoff
from kvxferd.mover.process.chunks import ChunkState
from kvxferd.mover.process.loop import MoverLoop
from kvxferd.mover.read_ways import ReadWay
from kvxferd.wire.limits import CHUNK_BYTES
from tests.support.memory_transport import Fabric, MemoryTransport


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
