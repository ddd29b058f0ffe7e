"""Each descriptor of a frame is closed once: what others open behind an error stays open."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from kvxferd.control.session_fds import pop_mover_socket, take_mover_socket
from kvxferd.core import events as ev
from kvxferd.errors import EngineError
from kvxferd.frame_socket import close_fds
from kvxferd.ids import Incarnation, TransferId
from kvxferd.memory import SealedMemory
from kvxferd.wire import worker as wk
from kvxferd.wire.common import FdBatch, Message
from tests.support.open_fds import num_open_fds
from tests.support.worker_socket_harness import LAYOUT, Listening, listening, register

NUM_OTHERS = 32


class Others:
    """Descriptors that others open between a session's end and its release: they get the free numbers."""

    def __init__(self) -> None:
        self.fds: list[int] = []

    def on_event(self, event: ev.Event) -> None:
        if isinstance(event, ev.WorkerDisconnected):
            self.fds += [os.memfd_create("other") for _ in range(NUM_OTHERS)]

    @property
    def num_closed(self) -> int:
        return sum(not is_open(fd) for fd in self.fds)

    def close(self) -> None:
        for fd in filter(is_open, self.fds):
            os.close(fd)
        self.fds.clear()


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@pytest.fixture
def others() -> Iterator[Others]:
    others = Others()
    yield others
    others.close()


@pytest.fixture
async def socket_(others: Others) -> AsyncIterator[Listening]:
    async with listening(on_event=others.on_event) as found:
        yield found


@pytest.fixture
def memory() -> Iterator[SealedMemory]:
    with SealedMemory.create(LAYOUT.regions[0].size_bytes, "kv") as memory:
        yield memory


@pytest.fixture
async def all_is_closed_once(socket_: Listening, others: Others) -> AsyncIterator[None]:
    """The daemon ends the test's one session, leaves nothing of it open, and closes nothing of others."""
    before = num_open_fds()
    yield
    await socket_.event(ev.WorkerDisconnected)
    for _ in range(3):  # it is released on the loop's next turn
        await asyncio.sleep(0)
    assert not socket_.workers._connections
    for connection in socket_.opened:
        connection.close()
    assert others.num_closed == 0
    others.close()
    assert num_open_fds() == before


async def admitted(socket_: Listening, memory: SealedMemory, num_descriptors: int) -> socket.socket:
    """A session whose registration has its first descriptor; the others are wanted."""
    connection = await socket_.session()
    await socket_.register(connection, num_descriptors, memory.fd)
    session = (await socket_.said(wk.Register)).session
    socket_.workers.send(session, wk.FdsRequest(request=1))
    return connection


@pytest.mark.usefixtures("all_is_closed_once")
async def test_a_part_beyond_the_share_is_closed_once(socket_: Listening, memory: SealedMemory) -> None:
    connection = await admitted(socket_, memory, num_descriptors=4)
    socket_.workers._fds.shares.limit = 1  # the part is kept and counted, and then too much
    await socket_.say(connection, FdBatch(first=1), *[memory.fd] * 8)


@pytest.mark.usefixtures("all_is_closed_once")
@pytest.mark.parametrize("first", [0, 3])
async def test_a_part_that_cannot_be_placed_is_closed_with_what_came_before(
    socket_: Listening, memory: SealedMemory, first: int
) -> None:
    """A new start without descriptors, and one with a gap."""
    connection = await admitted(socket_, memory, num_descriptors=40)
    await socket_.say(connection, FdBatch(first=1), *[memory.fd] * 8)
    await socket_.said(FdBatch)
    await socket_.say(connection, FdBatch(first=first), *[memory.fd] * first)


@pytest.mark.parametrize(
    "message",
    [wk.NewMover(), register(), wk.Ready(transfer_id=TransferId("t"), incarnation=Incarnation("i"))],
    ids=lambda m: type(m).__name__,
)
@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.usefixtures("all_is_closed_once")
async def test_whatever_is_wrong_with_a_frame_it_leaves_nothing_open_and_closes_nothing_twice(
    socket_: Listening, memory: SealedMemory, message: Message, count: int
) -> None:
    connection = await socket_.session()
    await socket_.say(connection, message, *[memory.fd] * count)
    connection.shutdown(socket.SHUT_WR)


def pipe_end() -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def datagram_end() -> int:
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).detach()


@pytest.mark.parametrize("make", [pipe_end, datagram_end])
def test_a_descriptor_that_is_no_movers_socket_stays_in_the_list(make) -> None:
    fds = [pipe_end(), make()]
    before = list(fds)
    message = wk.Resume(request=1, incarnation=Incarnation("i"), regions=(), placement="resident")
    with pytest.raises(EngineError, match="a Unix stream"):
        take_mover_socket(message, fds)
    assert fds == before
    assert all(map(is_open, fds))
    close_fds(fds)


def test_a_movers_socket_is_taken_out() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        fds = [pipe_end(), ours.detach()]
        with pop_mover_socket(fds):
            assert len(fds) == 1
        close_fds(fds)
