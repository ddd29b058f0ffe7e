"""The promises of the simulated shells, held against them and against the real ones."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import resource
import select
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvxferd.control.peer_socket import PeerSocket
from kvxferd.core import events as ev
from kvxferd.errors import Code, MoverError, ProtocolError
from kvxferd.frame_socket import LOST_FD, FrameSocket, close_fds, dup_fds
from kvxferd.ids import Endpoint, GrantId, MoverId
from kvxferd.wire.common import Message
from kvxferd.wire.framing import encode_header
from kvxferd.wire.peer import ReturnGrant
from tests.property.simulation.agenda import Actor, Agenda
from tests.property.simulation.shells.descriptors import DescriptorTable
from tests.property.simulation.shells.frame_streams import StreamEnd
from tests.property.simulation.shells.mover_pool import SimulatedHandle, SimulatedPool
from tests.property.simulation.shells.peer_connections import PeerEnd, PeerNetwork
from tests.support.mover_harness import Node
from tests.support.open_fds import num_open_fds

DEADLINE_S = 20.0


class Request:
    """What a pool has answered."""

    def __init__(self) -> None:
        self.result: Any = None

    def set(self, result: Any) -> None:
        assert self.result is None, "answered twice"
        self.result = result


class ModelPool:
    """The simulated pool, by a seed."""

    def __init__(self, size: int, seed: int) -> None:
        self.agenda = Agenda(seed)
        self.exits: list[MoverId] = []
        self.pool = SimulatedPool(
            Actor(self.agenda, "daemon"),
            random.Random(seed),
            size=size,
            mover_ids=itertools.count(1),
            on_exit=self.exits.append,
        )
        self.pool.start()

    async def until(self, holds: Callable[[], bool]) -> None:
        if not holds():
            self.agenda.run(self.agenda.now + DEADLINE_S, holds)
        assert holds()

    def request(self) -> Request:
        request = Request()
        self.pool.request(request.set)
        return request

    def status(self) -> Any:
        return self.pool.decisions.status()

    def num_early_deaths(self) -> int:
        return self.pool.decisions.num_died_unassigned

    def ready_mover(self) -> SimulatedHandle:
        return self.pool.handles[self.pool.decisions.warm()[0]]

    def signal_mover(self, handle: SimulatedHandle, number: int) -> None:
        self._signal(handle.process, number)

    def signal_forkserver(self, number: int) -> None:
        assert self.pool.forkserver is not None
        self._signal(self.pool.forkserver, number)

    def _signal(self, process: Any, number: int) -> None:
        {signal.SIGKILL: process.kill, signal.SIGSTOP: process.stop, signal.SIGCONT: process.resume}[number]()

    async def stop(self) -> None:
        self.pool.stop()
        await self.until(lambda: self.pool.is_stopped)


class RealPool:
    """A pool of real processes."""

    def __init__(self, size: int) -> None:
        self.node = Node("contract", size=size)
        self.exits = self.node.exits

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0.002)

    def request(self) -> Request:
        request = Request()
        self.node.pool.request(request.set)
        return request

    def status(self) -> Any:
        return self.node.pool.status()

    def num_early_deaths(self) -> int:
        return self.node.pool.num_died_unassigned

    def ready_mover(self) -> Any:
        return self.node.pool._handles[self.node.pool._decisions.warm()[0]]

    def signal_mover(self, handle: Any, number: int) -> None:
        os.kill(handle.pid, number)

    def signal_forkserver(self, number: int) -> None:
        assert self.node.pool.forkserver_pid is not None
        os.kill(self.node.pool.forkserver_pid, number)

    async def stop(self) -> None:
        await asyncio.wait_for(self.node.pool.stop(), DEADLINE_S)


Pool = ModelPool | RealPool


@pytest.fixture(params=["real", *range(5)])
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[Pool]:
    """A pool that keeps one mover ready, and has it."""
    made: Pool
    if request.param == "real":
        made = RealPool(1)
        await made.node.pool.start()
    else:
        made = ModelPool(1, request.param)
    try:
        await made.until(lambda: made.status().num_warm == 1)
        yield made
    finally:
        await made.stop()


async def assigned(pool: Pool) -> Any:
    request = pool.request()
    await pool.until(lambda: request.result is not None)
    assert not isinstance(request.result, MoverError)
    return request.result


async def test_movers_and_a_forkserver_that_stop_and_die(pool: Pool) -> None:
    """One test, as a real pool takes a second to start."""
    await check_that_sigkill_ends_a_stopped_mover(pool)
    await pool.until(lambda: pool.status().num_warm == 1)
    await check_that_a_dead_ready_mover_is_not_assigned(pool)
    await check_that_a_stopped_forkserver_answers_once_it_goes_on(pool)


async def check_that_sigkill_ends_a_stopped_mover(pool: Pool) -> None:
    first = await assigned(pool)
    second = await assigned(pool)
    pool.signal_mover(first, signal.SIGSTOP)
    pool.signal_mover(first, signal.SIGKILL)
    await pool.until(lambda: bool(pool.exits))
    pool.signal_mover(second, signal.SIGKILL)
    await pool.until(lambda: len(pool.exits) == 2)
    assert pool.exits == [first.mover_id, second.mover_id]


async def check_that_a_dead_ready_mover_is_not_assigned(pool: Pool) -> None:
    dead = pool.ready_mover()
    pool.signal_mover(dead, signal.SIGKILL)
    if isinstance(pool, RealPool):  # the event loop does not come to it before the request
        select.select([dead.pidfd], [], [], DEADLINE_S)
    else:
        await pool.until(lambda: not dead.process.is_alive)
    got = await assigned(pool)
    assert got.mover_id != dead.mover_id
    assert pool.num_early_deaths() == 1


async def test_the_forkservers_death_ends_stopped_movers_and_refuses_what_waits(pool: Pool) -> None:
    mover = await assigned(pool)
    pool.signal_mover(mover, signal.SIGSTOP)
    pool.signal_forkserver(signal.SIGSTOP)  # so that the fork is pending
    waiting = pool.request()
    pool.signal_forkserver(signal.SIGKILL)
    await pool.until(lambda: bool(pool.exits) and waiting.result is not None)
    assert pool.exits == [mover.mover_id]
    assert isinstance(waiting.result, MoverError)
    assert waiting.result.code is Code.MOVER_LOST
    assert (await assigned(pool)).mover_id != mover.mover_id


async def check_that_a_stopped_forkserver_answers_once_it_goes_on(pool: Pool) -> None:
    await assigned(pool)
    pool.signal_forkserver(signal.SIGSTOP)
    waiting = [pool.request(), pool.request()]
    assert [one.result for one in waiting] == [None, None]
    pool.signal_forkserver(signal.SIGCONT)
    await pool.until(lambda: all(one.result is not None for one in waiting))
    first, second = (one.result for one in waiting)
    assert first.mover_id != second.mover_id


async def test_a_pool_with_a_stopped_forkserver_and_mover_stops(pool: Pool) -> None:
    mover = await assigned(pool)
    pool.signal_mover(mover, signal.SIGSTOP)
    pool.signal_forkserver(signal.SIGSTOP)
    await pool.stop()
    assert pool.exits == [mover.mover_id]


# --- descriptors, and frames over the worker socket and the movers' sockets


class ModelStreams:
    """Two ends of a simulated connection, each of a process of its own."""

    def __init__(self) -> None:
        self.here, self.there = StreamEnd(DescriptorTable(100)), StreamEnd(DescriptorTable(100))
        self.here.connect(self.there)

    def dup_all(self, fds: list[int]) -> tuple[int, ...]:
        return self.here.table.dup_all(fds)

    def open(self) -> int:
        return self.here.table.open()

    def send_half(self) -> None:
        self.here.send_half()

    def accept_lost_fds(self) -> None:
        self.there.accepts_lost_fds = True

    def close_fds(self, fds: tuple[int, ...]) -> None:
        for table in (self.here.table, self.there.table):
            table.close_all(fds)

    def num_open(self) -> int:
        return len(self.here.table.open_fds) + len(self.there.table.open_fds)

    @contextmanager
    def full_table(self, room: int = 0) -> Iterator[None]:
        tables = (self.here.table, self.there.table)
        for table in tables:
            table.limit = len(table.open_fds) + room
        yield
        for table in tables:
            table.limit = 100

    def flush(self) -> None:
        """What was sent has arrived."""


class RealStreams(ModelStreams):
    """Two frame sockets over a socketpair of this process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._raw = ours
        self.here, self.there = FrameSocket(ours), FrameSocket(theirs)  # type: ignore[assignment]

    def dup_all(self, fds: list[int]) -> tuple[int, ...]:
        return dup_fds(fds)

    def open(self) -> int:
        return os.open("/dev/null", os.O_RDONLY)

    def send_half(self) -> None:
        self._raw.send(encode_header(100, 0) + b"half")
        self.here.close()

    def accept_lost_fds(self) -> None:
        self.there.accept_lost_fds()  # type: ignore[attr-defined]

    def close_fds(self, fds: tuple[int, ...]) -> None:
        close_fds(fds)

    def num_open(self) -> int:
        return num_open_fds(collect=False)

    @contextmanager
    def full_table(self, room: int = 0) -> Iterator[None]:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        next_fd = os.dup(0)
        os.close(next_fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_fd + room, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    def flush(self) -> None:
        for end in (self.here, self.there):
            end.flush()  # type: ignore[attr-defined]


@pytest.fixture(params=[ModelStreams, RealStreams])
def streams(request: pytest.FixtureRequest) -> Iterator[ModelStreams]:
    made = request.param()
    yield made
    made.here.close()
    made.there.close()


def payloads(frames: list[Any] | None) -> list[bytes] | None:
    return None if frames is None else [frame.payload for frame in frames]


def test_copies_of_descriptors_are_all_or_none(streams: ModelStreams) -> None:
    one = streams.open()
    before = streams.num_open()
    with streams.full_table(room=1), pytest.raises(OSError, match="Too many open files"):
        streams.dup_all([one, one])
    assert streams.num_open() == before
    copies = streams.dup_all([one, one])
    assert streams.num_open() == before + 2
    streams.close_fds((one, *copies))


def test_frames_arrive_whole_in_order_with_their_own_descriptors_and_then_the_end(
    streams: ModelStreams,
) -> None:
    streams.here.send(b"first")
    streams.here.send(b"second", (streams.open(), streams.open()))
    streams.here.send(b"third", (streams.open(),))
    streams.flush()
    streams.here.close()
    frames: list[Any] = []
    while (more := streams.there.receive()) is not None:
        frames += more
    assert payloads(frames) == [b"first", b"second", b"third"]
    assert [len(frame.fds) for frame in frames] == [0, 2, 1]
    for frame in frames:
        streams.close_fds(frame.fds)


def test_half_a_frame_is_never_returned(streams: ModelStreams) -> None:
    streams.here.send(b"whole")
    streams.flush()
    streams.send_half()
    assert payloads(streams.there.receive()) == [b"whole"]
    with pytest.raises(ProtocolError):
        streams.there.receive()


def test_what_nobody_reads_waits_and_stops_no_sender(streams: ModelStreams) -> None:
    sent = [bytes([number]) * 20_000 for number in range(100)]  # more than a socket holds
    for payload in sent:
        streams.here.send(payload)
        streams.flush()
    frames: list[Any] = []
    while len(frames) < len(sent):
        frames += streams.there.receive() or []
        streams.flush()
    assert payloads(frames) == sent


def test_what_is_sent_to_an_end_that_is_gone_is_dropped_and_its_descriptors_are_closed(
    streams: ModelStreams,
) -> None:
    streams.there.close()
    before = streams.num_open()
    for _ in range(2):
        streams.here.send(b"lost", (streams.open(),))
        streams.flush()
    assert streams.num_open() == before
    assert streams.here.receive() is None


@pytest.mark.parametrize("accepts", [False, True])
def test_a_reader_without_room_for_a_descriptor(streams: ModelStreams, accepts: bool) -> None:
    streams.here.send(b"with", (streams.open(),))
    streams.flush()
    if accepts:
        streams.accept_lost_fds()
    with streams.full_table():
        if accepts:
            (frame,) = streams.there.receive() or []
            assert (frame.payload, frame.fds) == (b"with", (LOST_FD,))
        else:
            with pytest.raises(ProtocolError):
                streams.there.receive()


# --- the peer socket


class Daemon:
    """A peer socket, with what it has received."""

    def __init__(self) -> None:
        self.requests: list[tuple[bytes, Message]] = []
        self.replies: list[tuple[str, Message]] = []
        self.socket: Any = None
        self.address = ""

    def on_event(self, event: ev.Event) -> None:
        match event:
            case ev.PeerRequest():
                self.requests.append((event.route, event.message))
            case ev.PeerReply():
                self.replies.append((event.endpoint, event.message))

    def numbers(self) -> list[int]:
        return [message.request for _, message in self.requests]  # type: ignore[attr-defined]


class Peers:
    """Daemons with peer sockets, simulated or real."""

    def __init__(self, network: PeerNetwork | None) -> None:
        self._network = network
        self.daemons: list[Daemon] = []

    def start(self, address: str = "") -> Daemon:
        """Start a daemon, at the address of an earlier one."""
        daemon = Daemon()
        self.daemons.append(daemon)
        if self._network is None:
            daemon.socket = PeerSocket(address or "tcp://127.0.0.1:0", daemon.on_event)
            daemon.socket.start()
            daemon.address = daemon.socket.bound_endpoint
        else:
            daemon.address = address or f"tcp://127.0.0.1:{len(self.daemons)}"
            daemon.socket = PeerEnd(
                self._network,
                daemon.address,
                lambda route, message: daemon.requests.append((route, message)),
                lambda endpoint, message: daemon.replies.append((endpoint, message)),
            )
        return daemon

    def stop(self, daemon: Daemon) -> None:
        self.daemons.remove(daemon)
        daemon.socket.stop()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0.002)


@pytest.fixture(params=["model", "real"])
async def peers(request: pytest.FixtureRequest) -> AsyncIterator[Peers]:
    made = Peers(PeerNetwork() if request.param == "model" else None)
    yield made
    for daemon in list(made.daemons):
        made.stop(daemon)


def question(number: int) -> Message:
    return ReturnGrant(request=number, grant=GrantId("g"))


async def test_replies_go_to_who_asked_until_it_disconnects(peers: Peers) -> None:
    here, there = peers.start(), peers.start()
    for number in range(5):
        here.socket.send(Endpoint(there.address), question(number))
    await peers.until(lambda: len(there.requests) == 5)
    assert there.numbers() == list(range(5))
    (old_route,) = {route for route, _ in there.requests}
    there.socket.reply(old_route, question(10))
    await peers.until(lambda: bool(here.replies))
    here.socket.disconnect(Endpoint(there.address))
    here.socket.send(Endpoint(there.address), question(6))
    await peers.until(lambda: len(there.requests) == 6)
    new_route, _ = there.requests[-1]
    assert new_route != old_route
    there.socket.reply(old_route, question(11))
    there.socket.reply(new_route, question(12))
    await peers.until(lambda: len(here.replies) == 2)
    assert here.replies == [(there.address, question(10)), (there.address, question(12))]


async def test_a_request_to_a_daemon_that_is_away_waits_for_the_next_at_its_address(peers: Peers) -> None:
    here, there = peers.start(), peers.start()
    here.socket.send(Endpoint(there.address), question(1))
    await peers.until(lambda: there.numbers() == [1])
    peers.stop(there)
    late, dropped = question(2), question(3)
    here.socket.send(Endpoint(there.address), dropped)
    here.socket.disconnect(Endpoint(there.address))
    here.socket.send(Endpoint(there.address), late)
    again = peers.start(there.address)
    await peers.until(lambda: bool(again.requests))
    assert again.numbers() == [2]
    again.socket.reply(again.requests[0][0], question(4))
    await peers.until(lambda: bool(here.replies))
