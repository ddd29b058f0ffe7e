"""What a session costs before it is admitted: next to nothing, however many its user opens."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
import structlog.testing

from kvxferd.control.session_fds import pop_mover_socket, take_mover_socket
from kvxferd.control.turns import MESSAGES_PER_TURN
from kvxferd.control.worker_socket import MAX_PARTIAL_BYTES, MAX_PARTIAL_FDS
from kvxferd.core import events as ev
from kvxferd.errors import Code, EngineError
from kvxferd.frame_socket import FrameSocket, close_fds
from kvxferd.ids import Incarnation, TransferId
from kvxferd.memory import SealedMemory
from kvxferd.wire import worker as wk
from kvxferd.wire.common import FdBatch, Message
from kvxferd.wire.framing import HEADER, Frame, encode_frame
from kvxferd.wire.limits import MAX_FDS_PER_FRAME, MAX_REGISTER_BYTES
from tests.support.open_fds import num_open_fds
from tests.support.worker_socket_harness import LAYOUT, Listening, listening, register


@pytest.fixture
async def socket_() -> AsyncIterator[Listening]:
    async with listening() as found:
        yield found


@pytest.fixture
def memory() -> Iterator[SealedMemory]:
    with SealedMemory.create(LAYOUT.regions[0].size_bytes, "kv") as memory:
        yield memory


@pytest.mark.parametrize(
    ("message", "num_fds", "code"),
    [
        (FdBatch(first=0), 1, Code.OUT_OF_PLACE),  # before the registration
        (wk.Hello(versions=wk.WORKER_VERSIONS, client="x"), 1, Code.BAD_FRAME),
        (register(), 0, Code.BAD_FRAME),  # without a socket for deliveries
    ],
    ids=lambda value: type(value).__name__,
)
async def test_descriptors_that_do_not_go_with_a_message_end_the_session(
    socket_: Listening, memory: SealedMemory, message: Message, num_fds: int, code: Code
) -> None:
    connection = await socket_.session()
    await socket_.said(wk.Hello)
    await socket_.say(connection, message, *[memory.fd] * num_fds)
    assert await socket_.code_of_farewell(connection) is code


async def test_a_hello_that_shares_no_version_is_refused(socket_: Listening) -> None:
    connection = await socket_.connection()
    future = {"t": "Hello", "versions": [7, 9], "client": {"name": "x"}, "shape": "another"}
    await socket_.send(connection, encode_frame(msgspec.msgpack.encode(future), 0))
    refused = await socket_.heard(connection)
    assert isinstance(refused, wk.Farewell)
    assert refused.code is Code.BAD_VERSION
    assert f"version 7 to 9: this one speaks {wk.WORKER_VERSIONS}; upgrade the older" in refused.message


async def test_a_session_that_the_node_ends_is_told_why_and_so_is_the_log(socket_: Listening) -> None:
    """Its engine's pulls are in no record of the node's: their worker is gone."""
    connection = await socket_.session()
    session = (await socket_.said(wk.Hello)).session
    with structlog.testing.capture_logs() as logged:
        farewell = wk.Farewell(code=Code.TRANSPORT, message="cannot register memory")
        socket_.workers.end_session(session, farewell)
    assert await socket_.code_of_farewell(connection) is Code.TRANSPORT
    (line,) = logged
    assert line["event"] == "worker session closed"
    assert (line["code"], line["reason"]) == (Code.TRANSPORT, "cannot register memory")


async def test_what_a_refused_registration_brought_is_closed(
    socket_: Listening, memory: SealedMemory
) -> None:
    connection = await socket_.session()
    await socket_.said(wk.Hello)
    before = num_open_fds()
    await socket_.register(connection, 0, memory.fd)
    session = (await socket_.said(wk.Register)).session
    assert num_open_fds() == before + 2
    socket_.workers.send(session, wk.Refused(request=1, code=Code.BUSY, message="no"))
    assert num_open_fds() == before


async def test_descriptors_behind_a_registration_come_once_it_is_admitted(
    socket_: Listening, memory: SealedMemory
) -> None:
    connection = await socket_.session()
    await socket_.register(connection, 3, memory.fd)
    said = await socket_.said(wk.Register)
    assert (said.problem, said.awaits_fds) == (None, True)
    socket_.workers.send(said.session, wk.FdsRequest(request=1))
    await socket_.say(connection, FdBatch(first=1), memory.fd, memory.fd)
    came = await socket_.event(ev.FdsArrived)
    # All three are there; that the one region needs one alone is what is wrong with them.
    assert came.problem is not None
    assert "3 came" in came.problem.message


async def test_a_user_may_not_hold_all_descriptors(socket_: Listening, memory: SealedMemory) -> None:
    socket_.workers._fds.shares.limit = 16
    connection = await socket_.session()
    await socket_.register(connection, 15, memory.fd)
    said = await socket_.said(wk.Register)
    assert said.problem is not None
    assert said.problem.code is Code.BUSY
    assert socket_.workers._fds.shares.held == 0


async def test_frames_that_are_not_whole_have_a_budget(socket_: Listening) -> None:
    """40 sessions stop in the middle of the largest frame; what is kept of all is bounded."""
    connections = [await socket_.session() for _ in range(40)]
    half = HEADER.pack(MAX_REGISTER_BYTES, 0, 0) + bytes(MAX_REGISTER_BYTES - 1)
    closed = 0
    for connection in connections:
        try:
            await asyncio.wait_for(socket_.send(connection, half), 20)
        except OSError:
            closed += 1
    await asyncio.sleep(0)
    kept = sum(c.stream.buffered[0] for c in socket_.workers._connections.values())
    assert kept <= MAX_PARTIAL_BYTES
    assert closed or len(socket_.workers._connections) < 40


async def test_descriptors_of_frames_that_are_not_whole_have_a_budget(
    socket_: Listening, memory: SealedMemory
) -> None:
    connections = [await socket_.session() for _ in range(8)]
    for _ in connections:
        await socket_.said(wk.Hello)
    before = num_open_fds()
    for connection in connections:
        beginning = HEADER.pack(100, MAX_FDS_PER_FRAME, 0) + b"x"
        await socket_.send(connection, beginning, *[memory.fd] * MAX_FDS_PER_FRAME)
    async with asyncio.timeout(10):
        while not any(map(_is_readable, connections)):
            assert num_open_fds() - before <= MAX_PARTIAL_FDS
            await asyncio.sleep(0.01)  # several turns of the loop: what is refused is closed on the next one
    assert num_open_fds() - before <= MAX_PARTIAL_FDS
    codes = [await socket_.code_of_farewell(c) for c in connections if _is_readable(c)]
    assert codes
    assert set(codes) == {Code.BUSY}


def _is_readable(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


async def test_who_is_not_admitted_and_reads_nothing_is_disconnected_soon(socket_: Listening) -> None:
    await socket_.session()
    session = (await socket_.said(wk.Hello)).session
    refused = wk.Refused(request=1, code=Code.BUSY, message="x" * 4000)
    num_sent = 0
    while socket_.received.empty():
        socket_.workers.send(session, refused)
        num_sent += 1
        assert num_sent < 200  # the kernel's buffer, and 64 KiB
    assert socket_.received.get_nowait() == ev.WorkerDisconnected(session)


async def test_an_attachment_brings_no_descriptors(socket_: Listening, memory: SealedMemory) -> None:
    """Anybody who may connect can attach, to an engine that is nobody's."""
    connection = await socket_.session()
    await socket_.say(connection, wk.Attach(request=1, engine_id="e", generation="g"))
    session = (await socket_.said(wk.Attach)).session
    socket_.workers.send(session, wk.Registered(request=1, endpoint="tcp://h:1"))
    await socket_.heard(connection)
    await socket_.say(connection, FdBatch(first=0), memory.fd)
    assert await socket_.code_of_farewell(connection) is Code.OUT_OF_PLACE


async def test_another_registration_while_descriptors_are_awaited_ends_the_session(
    socket_: Listening, memory: SealedMemory
) -> None:
    """Its regions would be checked against the descriptors, and those of the first be mapped."""
    connection = await socket_.session()
    await socket_.register(connection, 3, memory.fd)
    session = (await socket_.said(wk.Register)).session
    socket_.workers.send(session, wk.FdsRequest(request=1))
    await socket_.heard(connection)
    await socket_.register(connection, 2, memory.fd)
    assert await socket_.code_of_farewell(connection) is Code.OUT_OF_PLACE


async def test_a_rank_that_resumes_keeps_the_socket_that_it_registered_with(
    socket_: Listening, memory: SealedMemory
) -> None:
    connection = await socket_.session()
    with socket.socket() as own, socket.socket() as other:
        kept = os.fstat(own.fileno()).st_ino
        for deliveries in (own, other):
            await socket_.say(connection, register(), memory.fd, deliveries.fileno())
            session = (await socket_.said(wk.Register)).session
            if deliveries is own:
                socket_.workers.commit_region_fds(session)
    resume = wk.Resume(request=2, regions=register().regions, incarnation="second")
    await socket_.say(connection, resume, memory.fd)
    await socket_.said(wk.Resume)
    socket_.workers.commit_region_fds(session)
    _, deliveries_fd, _ = socket_.workers.bind_fds(session)
    assert os.fstat(deliveries_fd).st_ino == kept


# --- A session's frames are taken in turns: a flood of one does not keep the loop from others


NUM = 3 * MESSAGES_PER_TURN + 7


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, FrameSocket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    link = FrameSocket(ours)
    with theirs:
        yield theirs, link
    link.close()


def test_a_turn_takes_so_many_frames_and_the_next_goes_on(pair: tuple[socket.socket, FrameSocket]) -> None:
    theirs, link = pair
    sent = [number.to_bytes(4, "little") for number in range(NUM)]
    theirs.sendall(b"".join(map(encode_frame, sent)))
    taken, ends = list[Frame](), [0]
    while ends[-1] < NUM:
        link.handle_frames(taken.append, MESSAGES_PER_TURN, lambda: False)
        ends.append(len(taken))
    assert max(end - begin for begin, end in itertools.pairwise(ends)) <= MESSAGES_PER_TURN
    assert not link.has_buffered_frames
    assert [frame.payload for frame in taken] == sent


def test_one_that_takes_long_ends_the_turn(pair: tuple[socket.socket, FrameSocket]) -> None:
    theirs, link = pair
    theirs.sendall(encode_frame(b"a") + encode_frame(b"b"))
    taken = list[Frame]()
    assert link.handle_frames(taken.append, MESSAGES_PER_TURN, lambda: True) == 1
    assert [frame.payload for frame in taken] == [b"a"]
    assert link.has_buffered_frames


def test_frames_that_nobody_takes_are_closed(pair: tuple[socket.socket, FrameSocket]) -> None:
    theirs, link = pair
    read, write = os.pipe()
    socket.send_fds(theirs, [encode_frame(b"first", 0)], [])
    socket.send_fds(theirs, [encode_frame(b"", 1)], [write])
    os.close(write)

    def stop_at(frame: Frame) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        link.handle_frames(stop_at, MESSAGES_PER_TURN, lambda: False)
    link.close()
    assert os.read(read, 1) == b"", "the writing end is open"
    os.close(read)


# --- each descriptor of a frame is closed once: what others open behind an error stays open


NUM_OTHERS = 32


def is_open(fd: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{fd}")


@pytest.fixture
async def closing_once() -> AsyncIterator[Listening]:
    """The daemon ends the test's one session, leaves nothing of it open, and closes nothing of others.

    Others open descriptors between a session's end and its release: they get the free numbers.
    """
    others: list[int] = []

    def open_others(event: ev.Event) -> None:
        if isinstance(event, ev.WorkerDisconnected):
            others.extend(os.memfd_create("other") for _ in range(NUM_OTHERS))

    async with listening(on_event=open_others) as socket_:
        before = num_open_fds()
        yield socket_
        await socket_.event(ev.WorkerDisconnected)
        for _ in range(3):  # it is released on the loop's next turn
            await asyncio.sleep(0)
        assert not socket_.workers._connections
        for connection in socket_.opened:
            connection.close()
        assert all(map(is_open, others))
        close_fds(others)
        assert num_open_fds() == before


async def admitted(socket_: Listening, memory: SealedMemory, num_descriptors: int) -> socket.socket:
    """A session whose registration has its first descriptor; the others are wanted."""
    connection = await socket_.session()
    await socket_.register(connection, num_descriptors, memory.fd)
    session = (await socket_.said(wk.Register)).session
    socket_.workers.send(session, wk.FdsRequest(request=1))
    return connection


async def test_a_part_beyond_the_share_is_closed_once(closing_once: Listening, memory: SealedMemory) -> None:
    connection = await admitted(closing_once, memory, num_descriptors=4)
    closing_once.workers._fds.shares.limit = 1  # the part is kept and counted, and then too much
    await closing_once.say(connection, FdBatch(first=1), *[memory.fd] * 8)


@pytest.mark.parametrize("first", [0, 3])
async def test_a_part_that_cannot_be_placed_is_closed_with_what_came_before(
    closing_once: Listening, memory: SealedMemory, first: int
) -> None:
    """A new start without descriptors, and one with a gap."""
    connection = await admitted(closing_once, memory, num_descriptors=40)
    await closing_once.say(connection, FdBatch(first=1), *[memory.fd] * 8)
    await closing_once.said(FdBatch)
    await closing_once.say(connection, FdBatch(first=first), *[memory.fd] * first)


@pytest.mark.parametrize(
    "message",
    [wk.NewMover(), register(), wk.Ready(transfer_id=TransferId("t"), incarnation=Incarnation("i"))],
    ids=lambda m: type(m).__name__,
)
@pytest.mark.parametrize("count", [2, 5])
async def test_whatever_is_wrong_with_a_frame_it_leaves_nothing_open_and_closes_nothing_twice(
    closing_once: Listening, memory: SealedMemory, message: Message, count: int
) -> None:
    connection = await closing_once.session()
    await closing_once.say(connection, message, *[memory.fd] * count)
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
