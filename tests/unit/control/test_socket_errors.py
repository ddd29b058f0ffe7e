"""The shells in one process: what they do when something cannot be done."""

from __future__ import annotations

import asyncio
import resource
import socket
from pathlib import Path

import pytest

from kvxferd.config import WorkerConfig
from kvxferd.control.peer_socket import PeerSocket
from kvxferd.control.worker_socket import WorkerSocket
from kvxferd.core import events as ev
from kvxferd.errors import Code
from kvxferd.ids import Endpoint, SessionId
from kvxferd.wire.limits import MAX_FRAME_BYTES
from kvxferd.wire.peer import PEER_VERSIONS, PeerHello
from kvxferd.wire.worker import Farewell
from tests.support.early_checks import NoChecks
from tests.support.peer_messages import Messages

REQUEST = PeerHello(request=1, versions=PEER_VERSIONS, boot="b", endpoint=Endpoint("tcp://x:1"))


async def next_of(received: Messages) -> ev.Event:
    return await asyncio.wait_for(received.next(), 20)


async def test_an_endpoint_that_libzmq_refuses_is_unreachable_and_no_more():
    received = Messages()
    peers = PeerSocket("tcp://127.0.0.1:0", received.put, NoChecks)
    peers.start()
    try:
        peers.send(Endpoint("nonsense"), REQUEST)
        peers.send(Endpoint("tcp://-x:1"), REQUEST)
        peers.send(Endpoint(peers.bound_endpoint), REQUEST)
        unreachable = []
        while isinstance(event := await next_of(received), ev.PeerUnreachable):
            unreachable.append(event.endpoint)
        assert event.message == REQUEST
        assert set(unreachable) <= {"nonsense", "tcp://-x:1"}
    finally:
        peers.stop()


class Counting(WorkerSocket):
    """Says how often it tried to accept."""

    def __init__(self, path: Path) -> None:
        self.received = Messages()
        self.path = str(path)
        self.num_accepts = 0
        self.tried = asyncio.Event()
        super().__init__(WorkerConfig(socket=self.path), self.received.put)

    def _accept(self) -> None:
        self.num_accepts += 1
        self.tried.set()
        super()._accept()


@pytest.fixture
async def workers(tmp_path: Path):
    made = Counting(tmp_path / "w.sock")
    made.start()
    yield made
    made.stop()
    await asyncio.sleep(0)


def connect(workers: Counting) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.connect(workers.path)
    return made


async def test_a_message_too_long_for_a_frame_ends_the_session_it_is_for(workers):
    with connect(workers):
        assert isinstance(await next_of(workers.received), ev.WorkerConnected)
        workers.send(SessionId(1), Farewell(code=Code.INTERNAL, message="x" * MAX_FRAME_BYTES))
        assert isinstance(await next_of(workers.received), ev.WorkerDisconnected)


async def test_without_descriptors_it_waits_and_does_not_spin(workers):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with connect(workers):
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            await asyncio.wait_for(workers.tried.wait(), 20)
            for _ in range(50):
                await asyncio.sleep(0)  # turns of the loop in which it could try again
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert isinstance(await next_of(workers.received), ev.WorkerConnected)
    assert workers.num_accepts <= 3
