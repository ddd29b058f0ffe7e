"""What every transport promises, tried on the in-memory one and on NIXL over CMA and TCP."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvxferd.ids import AgentName
from kvxferd.mover.backends import DEFAULT_BACKEND, Backend
from kvxferd.mover.transport.base import HOST, MemoryKind, MemoryRange, ReadKinds, Transport, TransportError
from kvxferd.mover.transport.nixl import NixlTransport, import_library
from kvxferd.mover.ucx_settings import tls_with_cuda
from kvxferd.plan import Runs
from tests.support.memory_transport import Fabric, MemoryTransport
from tests.support.mover_harness import DEADLINE_S, MARK
from tests.support.nodes.processes import started_with
from tests.support.transport_peer import ChildPeer, Peer

PAGE = 1 << 16
_NUMBERS = itertools.count()


class World:
    """A reader with memory of its own, and peers on demand."""

    def __init__(self, transport: Transport, make_peer: Callable[[AgentName], Peer | ChildPeer]) -> None:
        self.transport = transport
        self.proves = True  # a lost connection proves that nothing lands any more
        self._make_peer = make_peer
        self._idle: list[Peer | ChildPeer] = []
        self._peers: list[Peer | ChildPeer] = []
        self._page = mmap.mmap(-1, PAGE)
        self.span = MemoryRange(ctypes.addressof(ctypes.c_char.from_buffer(self._page)), PAGE)
        transport.register(self.span)

    @property
    def bytes(self) -> bytes:
        return self._page[:]

    def clear(self) -> None:
        self._page[:] = bytes(PAGE)

    def peer(self) -> Peer | ChildPeer:
        """Return a peer that nobody else uses; one of an earlier test, if it lives."""
        name = AgentName(f"peer/{os.getpid()}-{next(_NUMBERS)}")
        self._peers.append(self._idle.pop() if self._idle else self._make_peer(name))
        return self._peers[-1]

    def kill(self, peer: Peer | ChildPeer) -> None:
        self._peers.remove(peer)
        peer.kill()

    def read(self, agent: AgentName, *runs: tuple[int, int, int], kinds: ReadKinds = HOST) -> None:
        """Read (local offset, remote address, length) to the end."""
        columns = np.array(runs, dtype=np.uint64).reshape(-1, 3).T
        handle = self.transport.post(
            agent,
            Runs(columns[0] + np.uint64(self.span.address), columns[1].copy(), columns[2].copy()),
            kinds,
        )
        deadline = time.monotonic() + DEADLINE_S
        while not self.transport.poll(handle):
            assert time.monotonic() < deadline, "the read never ended"
        assert handle.done
        self.transport.release(handle)

    def forget(self) -> None:
        """A test is over."""
        for peer in self._peers:
            self.transport.drop_remote(peer.agent)
        self._idle += self._peers
        self._peers.clear()

    def end(self) -> None:
        for peer in self._idle:
            peer.kill()
        self.transport.close()
        assert started_with("KVXFERD_TEST", MARK) == {}


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """The reader's agent lives in this process and connects as it likes; peers go with the module."""


@pytest.fixture(scope="module", params=["memory", "cma", "tcp", "tcp with parameters"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    if request.param == "memory":
        fabric = Fabric()
        made = World(
            MemoryTransport(fabric, AgentName("reader")),
            lambda name: Peer(MemoryTransport(fabric, name)),
        )
        yield made
        made.end()
        return
    environment = {"UCX_TLS": tls_with_cuda("tcp")} if request.param.startswith("tcp") else {}
    backend = (
        Backend("UCX", {"ucx_error_handling_mode": "peer"})
        if "parameters" in request.param
        else DEFAULT_BACKEND
    )
    patch = pytest.MonkeyPatch()
    for name, value in environment.items():
        patch.setenv(name, value)
    name = AgentName(f"reader/{request.param.replace(' ', '-')}-{os.getpid()}")
    transport = NixlTransport(import_library(), name, backend)
    patch.undo()
    logs = tmp_path_factory.mktemp("peers")
    marked = {**os.environ, "KVXFERD_TEST": MARK, **environment}
    made = World(transport, lambda name: ChildPeer(name, logs / f"{name.replace('/', '-')}.log", marked))
    # Which transports are there is known from the setting alone here; a mover asks its daemon for the others.
    made.proves = bool(environment) and not backend.parameters
    yield made
    made.end()


@pytest.fixture
def world(built: World) -> Iterator[World]:
    built.clear()
    yield built
    built.forget()


def test_a_read_lands_these_bytes_and_no_others(world: World) -> None:
    peer = world.peer()
    there = peer.allocate(PAGE)
    content = np.arange(1, 257, dtype=np.uint8).tobytes() * (PAGE // 256)
    peer.write(there, 0, content)
    assert world.transport.load_remote(peer.describe(there)) == peer.agent
    starts = range(0, PAGE, 128)  # many in one read, every second stretch
    world.read(peer.agent, *((start, there.address + PAGE - 64 - start, 64) for start in starts))
    wanted = b"".join(content[PAGE - 64 - start : PAGE - start] + bytes(64) for start in starts)
    assert world.bytes == wanted


def test_an_agent_reads_its_own_memory_without_loading_itself(world: World) -> None:
    with mmap.mmap(-1, PAGE) as page:
        anchor = ctypes.c_char.from_buffer(page)
        own = MemoryRange(ctypes.addressof(anchor), PAGE)
        del anchor
        page[:5] = b"mine!"
        world.transport.register(own)
        world.read(world.transport.agent, (7, own.address, 5))
        world.transport.deregister(own)
    assert world.bytes[:12] == bytes(7) + b"mine!"


def test_memory_is_named_by_its_device(world: World) -> None:
    """A device's number is the owner's own: what it says, its readers say."""
    peer = world.peer()
    there = peer.allocate(PAGE, device=3)
    peer.write(there, 0, b"third")
    world.transport.load_remote(peer.describe(there))
    world.read(peer.agent, (0, there.address, 5), kinds=ReadKinds(remote=MemoryKind("DRAM", 3)))
    assert world.bytes[:5] == b"third"
    with pytest.raises(TransportError):
        world.read(peer.agent, (0, there.address, 5))


def test_agents_tell_each_other_things(world: World) -> None:
    """Both ways, in order, with the teller's name."""
    peer = world.peer()
    there = peer.allocate(PAGE)
    world.transport.load_remote(peer.describe(there))
    notes = [b"first", bytes(range(256)) * 32, b"last"]
    for note in notes:
        world.transport.notify(peer.agent, note)
    received: list[tuple[str, bytes]] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(received) < len(notes):
        assert time.monotonic() < deadline, f"only {len(received)} notes came"
        world.transport.progress()
        received += peer.received()
    assert received == [(world.transport.agent, note) for note in notes]
    peer.tell(world.transport.metadata([world.span]), b"answer")
    replies: list[tuple[AgentName, bytes]] = []
    while not replies:
        assert time.monotonic() < deadline, "no answer came"
        replies += world.transport.receive_notifications()
    assert replies == [(peer.agent, b"answer")]


def test_nobody_is_told_who_is_not_loaded(world: World) -> None:
    with pytest.raises(TransportError) as raised:
        world.transport.notify(AgentName("nobody"), b"hello")
    assert raised.value.settled


def test_only_described_memory_is_readable(world: World) -> None:
    peer = world.peer()
    first, second = peer.allocate(PAGE), peer.allocate(PAGE)
    world.transport.load_remote(peer.describe(first))
    with pytest.raises(TransportError) as raised:
        world.read(peer.agent, (0, second.address, 16))
    assert (raised.value.settled, raised.value.lost) == (True, False)
    world.read(peer.agent, (0, first.address, 16))


def test_an_agent_that_is_loaded_again_has_more_memory(world: World) -> None:
    peer = world.peer()
    first = peer.allocate(PAGE)
    peer.write(first, 0, b"first")
    world.transport.load_remote(peer.describe(first))
    world.read(peer.agent, (0, first.address, 5))
    second = peer.allocate(PAGE)
    peer.write(second, 0, b"second")
    for _ in range(2):
        assert world.transport.load_remote(peer.describe(second)) == peer.agent
    world.read(peer.agent, (5, second.address, 6))
    world.read(peer.agent, (11, first.address, 5))
    assert world.bytes[:16] == b"firstsecondfirst"


def test_a_read_sees_what_was_written_before_it(world: World) -> None:
    """What the fence word rests on."""
    peer = world.peer()
    there = peer.allocate(PAGE)
    world.transport.load_remote(peer.describe(there))
    for word in (b"1" * 16, b"2" * 16, b"3" * 16):
        peer.write(there, 32, word)
        world.read(peer.agent, (64, there.address + 32, 16))
        assert world.bytes[64:80] == word


@pytest.mark.parametrize("case", ["unknown agent", "beyond their memory", "beyond ours"])
def test_what_cannot_be_read_is_refused_before_anything_moves(world: World, case: str) -> None:
    peer = world.peer()
    there = peer.allocate(PAGE)
    world.transport.load_remote(peer.describe(there))
    agent = AgentName("nobody") if case == "unknown agent" else peer.agent
    remote = there.address + PAGE - 8 if case == "beyond their memory" else there.address
    local = PAGE - 8 if case == "beyond ours" else 0
    with pytest.raises(TransportError) as raised:
        world.read(agent, (local, remote, 16))
    assert (raised.value.settled, raised.value.lost) == (True, False)
    assert agent in raised.value.message
    assert world.bytes == bytes(PAGE)
    world.read(peer.agent, (0, there.address, 16))


@pytest.mark.parametrize("metadata", [b"", b"nonsense", b"\0" * 300])
def test_metadata_that_is_none_is_refused(world: World, metadata: bytes) -> None:
    with pytest.raises(TransportError) as raised:
        world.transport.load_remote(metadata)
    assert raised.value.settled


def test_metadata_of_another_agent_is_not_loaded_and_the_other_is_read(world: World) -> None:
    """A daemon may say anything of its agents: a cut copy of another's must not spoil the other."""
    peer = world.peer()
    there = peer.allocate(PAGE)
    metadata = peer.describe(there)
    for false in (metadata, metadata[:-20]):
        with pytest.raises(TransportError) as raised:
            world.transport.load_remote(false, AgentName("boot/another"))
        assert raised.value.settled
    assert world.transport.load_remote(metadata, peer.agent) == peer.agent
    world.read(peer.agent, (0, there.address, 16))


@pytest.mark.parametrize("was_read", [True, False])
def test_a_peer_that_dies_is_lost_and_another_is_read(world: World, was_read: bool) -> None:
    peer, other = world.peer(), world.peer()
    there, elsewhere = peer.allocate(PAGE), other.allocate(PAGE)
    for one, span in ((peer, there), (other, elsewhere)):
        world.transport.load_remote(one.describe(span))
        if was_read:
            world.read(one.agent, (0, span.address, 16))
    world.kill(peer)
    if not was_read:
        with pytest.raises(TransportError) as raised:
            world.read(peer.agent, (0, there.address, 16))
        assert raised.value.settled == world.proves
        return
    for _ in range(2):
        with pytest.raises(TransportError) as raised:
            world.read(peer.agent, (0, there.address, 16))
        assert (raised.value.settled, raised.value.lost) == (world.proves, True)
    world.read(other.agent, (0, elsewhere.address, 16))
    world.transport.drop_remote(peer.agent)
    with pytest.raises(TransportError) as raised:
        world.read(peer.agent, (0, there.address, 16))
    assert (raised.value.settled, raised.value.lost) == (True, False)


def test_an_agent_that_was_dropped_can_be_loaded_again(world: World) -> None:
    peer = world.peer()
    there = peer.allocate(PAGE)
    metadata = peer.describe(there)
    world.transport.load_remote(metadata)
    world.read(peer.agent, (0, there.address, 16))
    world.transport.drop_remote(peer.agent)
    world.transport.drop_remote(peer.agent)
    peer.write(there, 0, b"again")
    world.transport.load_remote(metadata)
    world.read(peer.agent, (0, there.address, 5))
    assert world.bytes[:5] == b"again"


def test_memory_can_be_registered_and_taken_back(world: World) -> None:
    page = mmap.mmap(-1, PAGE)
    span = MemoryRange(ctypes.addressof(ctypes.c_char.from_buffer(page)), PAGE)
    world.transport.register(span)
    assert world.transport.metadata([span])
    world.transport.deregister(span)
    for spans in ([span], []):
        with pytest.raises(TransportError):
            world.transport.metadata(spans)


def test_an_agent_is_loaded_twice_by_the_same_metadata(world: World) -> None:
    peer = world.peer()
    there = peer.allocate(PAGE)
    metadata = peer.describe(there)
    for content in (b"first", b"again"):
        assert world.transport.load_remote(metadata) == peer.agent
        peer.write(there, 0, content)
        world.read(peer.agent, (0, there.address, 5))
        assert world.bytes[:5] == content
