"""Two nodes' movers in one test: real processes, real memory, no daemon."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from kvxferd.core import events
from kvxferd.errors import Code, MoverError
from kvxferd.ids import (
    AgentName,
    EngineId,
    Generation,
    GroupName,
    MoverId,
    PullId,
    Rank,
    SessionId,
    Ticket,
)
from kvxferd.layout import EngineSpec, PackedBlocks, RankLayout, pack_ids
from kvxferd.layout.presets import attention_layout
from kvxferd.memory import FencePage, SealedMemory
from kvxferd.mover.backends import DEFAULT_BACKEND, Backend
from kvxferd.mover.supervisor.handle import MoverHandle
from kvxferd.mover.supervisor.processes import MoverProcesses
from kvxferd.mover.ucx_settings import tls_with_cuda
from kvxferd.plan import Plan, encode_plan, make_plan
from kvxferd.wire.block_id_parts import split_block_ids
from kvxferd.wire.common import Refusal
from kvxferd.wire.limits import CHUNK_BYTES, FENCE_PAGE_BYTES, FENCE_WORD_BYTES
from kvxferd.wire.mover import (
    Bind,
    Bound,
    ChunkMemoryGranted,
    ChunkMemoryRequest,
    FenceLocation,
    FenceMapped,
    FromMover,
    LoadPlan,
    LoadRemote,
    MapFence,
    MoverUp,
    PiecesRead,
    Polling,
    PullDone,
    PullOutcome,
    ReadWay,
    SetPolling,
    SourceRank,
    StartPull,
)
from kvxferd.wire.worker import RegionExport
from tests.support.nodes.processes import started_with, state_of
from tests.support.open_fds import num_open_fds

DEADLINE_S = 20.0
WORD = bytes(range(16))  # of the fence
MARK = f"movers-of-{os.getpid()}"  # in the environment of every process of a `Node`
SHARED_MARK = f"shared-by-tests-of-{os.getpid()}"  # in the environment of every process of `Pools`
# What selects each transport in a mover's environment.
TRANSPORTS: dict[str, dict[str, str]] = {"cma": {}, "tcp": {"UCX_TLS": tls_with_cuda("tcp")}}
GROUP = GroupName("full")
T = TypeVar("T")
_NUMBERS = itertools.count(1)
_FORKSERVERS: list[int] = []  # the process id of each that a pool of this process has started


async def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Return once `holds()` is true, of what no event of a `Node` tells; fail with `what` if it never is."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:g} s: {what}"
        await asyncio.sleep(0.01)


class Node:
    """The movers of a node, each forked when it is acquired, and what they said."""

    read_way = ReadWay.DIRECT  # of ranks that are bound from now on

    def __init__(
        self,
        name: str,
        environment: Mapping[str, str] | None = None,
        chunk_memory: int = 1 << 30,
        backend: Backend = DEFAULT_BACKEND,
        read_way: ReadWay | None = None,
    ) -> None:
        """`chunk_memory`: the bytes that each mover is granted for covering reads, if it wants so many."""
        if read_way is not None:
            self.read_way = read_way
        self._name = name
        self._chunk_memory = chunk_memory
        self.library = ""  # once the forkserver has it
        self.unavailable = ""  # why it has none
        self.warm: list[MoverHandle] = []  # which are acquired first
        self.acquired: list[MoverHandle] = []
        self._forked: dict[MoverId, Refusal | None] = {}  # None: it is up
        self.said: list[tuple[MoverId, FromMover]] = []
        self.exits: list[MoverId] = []
        self.chunk_reports: dict[MoverId, ChunkMemoryRequest] = {}  # the last one of each
        self._changed = asyncio.Event()
        environment = {"KVXFERD_TEST": MARK, **(environment or {})}
        self.processes = MoverProcesses(self._on_event, environment=environment, backend=backend)

    async def __aenter__(self) -> Node:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.wait_for(self.processes.stop(), DEADLINE_S)

    def start(self) -> None:
        """Start the forkserver; again, where it died."""
        self.processes.start_forkserver()
        if self.processes.forkserver_pid is not None:
            _FORKSERVERS.append(self.processes.forkserver_pid)

    async def fork(self) -> MoverHandle:
        """Return a new mover that has made its agent. Raises MoverError."""
        if await self.until(lambda: self.unavailable or self.library or None) == self.unavailable:
            raise MoverError(self.unavailable, Code.NIXL_UNAVAILABLE)
        mover = MoverId(next(_NUMBERS))
        self.processes.fork(mover, AgentName(f"{self._name}/{mover}"))
        handle = self.processes._handles.get(mover)
        await self.until(lambda: mover in self._forked or None)
        if (refusal := self._forked.pop(mover)) is not None:
            raise MoverError(refusal.message, refusal.code)
        assert handle is not None
        return handle

    async def acquire(self) -> MoverHandle:
        """Return a mover that nobody else has. Raises MoverError."""
        self.acquired.append(self.warm.pop(0) if self.warm else await self.fork())
        return self.acquired[-1]

    async def rest(self) -> None:
        """End the movers that were acquired, and forget what they said: the next test finds none."""
        for mover in self.acquired:
            mover.kill()
            await self.gone(mover)
        for gone in (self.acquired, self.said, self.exits, self.chunk_reports):
            gone.clear()

    def num_fds(self) -> int:
        """Return how many descriptors the forkserver and the movers hold here."""
        forkserver = 0 if self.processes.forkserver_pid is None else 3  # its socket, its stderr and its pidfd
        return forkserver + sum(1 + (handle.pidfd >= 0) for handle in self.processes._handles.values())

    def _on_event(self, event: events.Event) -> None:
        match event:
            case events.ForkserverReady():
                self.library = event.library
            case events.LibraryUnavailable():
                self.unavailable = event.reason
            case events.ForkserverExited():
                self.library = ""
            case events.MoverNotStarted():
                self._forked[event.mover] = event.refusal
            case events.MoverMessage(message=MoverUp()):
                self._forked[event.mover] = None
            case events.MoverMessage(message=ChunkMemoryRequest() as report):
                self.chunk_reports[event.mover] = report
                num_chunks = min(report.num_wanted, self._chunk_memory // CHUNK_BYTES)
                self.processes.send(event.mover, ChunkMemoryGranted(num_chunks=num_chunks))
            case events.MoverMessage():
                self.said.append((event.mover, event.message))
            case events.MoverDied():
                self._forked.setdefault(event.mover, Refusal(Code.MOVER_LOST, "it died"))
                self.exits.append(event.mover)
        self._changed.set()

    async def until(self, found: Callable[[], T | None], deadline_s: float = DEADLINE_S) -> T:
        """Wait for something to be said or to happen."""
        async with asyncio.timeout(deadline_s):
            while (value := found()) is None:
                self._changed.clear()
                await self._changed.wait()
            return value

    async def received(self, mover: MoverHandle, kind: type[T], deadline_s: float = DEADLINE_S) -> T:
        """Wait for the first message of a kind, and take it out."""

        def find() -> T | None:
            for index, (who, message) in enumerate(self.said):
                if who == mover.mover_id and isinstance(message, kind):
                    del self.said[index]
                    return message
            return None

        return await self.until(find, deadline_s)

    async def gone(self, mover: MoverHandle) -> None:
        """Wait for a mover's exit to be told."""
        await self.until(lambda: True if mover.mover_id in self.exits else None)


@dataclass
class Worker:
    """A rank: its layout, its memory, and a process that stands for it."""

    spec: EngineSpec
    layout: RankLayout
    memory: SealedMemory
    process: subprocess.Popen[bytes]
    pidfd: int
    deliveries: socket.socket  # what its mover sends it
    mover_end: socket.socket

    @property
    def fds(self) -> tuple[int, ...]:
        """What `Bind` carries."""
        return self.memory.fd, self.mover_end.fileno(), self.pidfd

    @property
    def array(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """All bytes."""
        return np.frombuffer(self.memory.buffer, dtype=np.uint8)

    def fill(self, seed: int) -> None:
        """Put bytes there that no other seed puts there."""
        self.array[:] = np.random.default_rng(seed).integers(0, 256, self.memory.size_bytes, dtype=np.uint8)

    def blocks(self, ids: list[int] | range) -> np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]:
        """Return the content of blocks: (tensors, blocks, bytes). All layers lie alike, tensor by tensor."""
        per_tensor = self.array.reshape(len(self.layout.tensors), self.layout.groups[0].num_blocks, -1)
        return per_tensor[:, list(ids)].copy()

    def export(self) -> tuple[RegionExport, ...]:
        (region,) = self.layout.regions
        return (RegionExport(region=region.region, size_bytes=region.size_bytes, fd_index=0),)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        os.close(self.pidfd)
        self.memory.close()
        self.deliveries.close()
        self.mover_end.close()


def worker(
    engine: str,
    *,
    tp: int = 1,
    tp_rank: int = 0,
    layers: int = 2,
    blocks: int = 64,
    layout: str = "HND",
    **shape: int,
) -> Worker:
    """Start a rank of a plain attention model; its memory is zeros."""
    spec = EngineSpec(
        engine_id=EngineId(engine),
        generation=Generation("g1"),
        num_layers=layers,
        tp_size=tp,
        tp_rank=tp_rank,
        num_kv_heads=2,
    )
    own = attention_layout(
        spec=spec,
        num_kv_heads=2,
        head_dim=shape.get("head_dim", 64),
        block_tokens=shape.get("block_tokens", 16),
        num_blocks=blocks,
        layout=layout,
    )
    return worker_of(spec, own)


def worker_of(spec: EngineSpec, layout: RankLayout) -> Worker:
    """Start a rank of that layout, of one region; its memory is zeros."""
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    memory = SealedMemory.create(layout.regions[0].size_bytes, "kvxferd-test")
    sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    return Worker(spec, layout, memory, process, os.pidfd_open(process.pid), *sockets)


def packed(ids: list[int] | range) -> dict[GroupName, PackedBlocks]:
    return {GROUP: PackedBlocks(pack_ids(list(ids)))}


async def bind(node: Node, rank: Worker) -> tuple[MoverHandle, Bound]:
    """Take a mover and give it the rank's memory."""
    mover = await node.acquire()
    mover.send(Bind(regions=rank.export(), read_way=node.read_way), rank.fds)
    return mover, await node.received(mover, Bound)


@dataclass
class Served:
    """A source rank that can be read."""

    worker: Worker
    node: Node
    mover: MoverHandle
    bound: Bound
    page: FencePage
    fence: FenceMapped

    def close(self) -> None:
        self.page.close()

    def place(self, slot: int, word: bytes) -> FenceLocation:
        return FenceLocation(self.mover.agent, self.fence.address + slot * FENCE_WORD_BYTES, word)


async def serve(node: Node, rank: Worker) -> Served:
    """Bind a source, map a fence page in it, and have it polled."""
    mover, bound = await bind(node, rank)
    page = FencePage.create()
    mover.send(MapFence(session=SessionId(1), size_bytes=FENCE_PAGE_BYTES), (page.fd,))
    fence = await node.received(mover, FenceMapped)
    mover.send(SetPolling(on=True, token=5))
    assert (await node.received(mover, Polling)).token == 5
    return Served(rank, node, mover, bound, page, fence)


@dataclass
class Sink:
    """A rank that reads."""

    worker: Worker
    node: Node
    mover: MoverHandle
    plan: Plan

    def know(self, agent: AgentName, *metadata: bytes) -> None:
        for one in metadata:
            self.mover.send(LoadRemote(agent=agent, metadata=one))

    async def read(self, source: Served, ours: list[int] | range, theirs: list[int] | range) -> PullOutcome:
        """Read by `WORD` in the source's slot 0, to the end."""
        return await self.outcome(self.start([source], source.place(0, WORD), ours, theirs))

    def start(
        self,
        sources: list[Served],
        fence: FenceLocation,
        ours: list[int] | range,
        theirs: list[int] | range,
        tokens: int = 0,
        before: PiecesRead | None = None,
    ) -> PullId:
        number = PullId(next(_NUMBERS))
        local_parts, local = split_block_ids(packed(ours), 2 * number)
        remote_parts, remote = split_block_ids(packed(theirs), 2 * number + 1)
        for part in (*local_parts, *remote_parts):
            self.mover.send(part)
        self.mover.send(
            StartPull(
                pull=number,
                plan=self.plan.digest,
                sources=tuple(
                    SourceRank(s.worker.spec.rank, s.mover.agent, s.bound.regions) for s in sources
                ),
                local=local,
                remote=remote,
                num_tokens=tokens or 16 * len(ours),
                fence=fence,
                stream=2 * number,
                ticket=Ticket(number + 1000),
                before=before,
            )
        )
        return number

    async def outcome(self, number: PullId, deadline_s: float = DEADLINE_S) -> PullOutcome:
        done = await self.node.received(self.mover, PullDone, deadline_s)
        assert done.pull == number
        return done.outcome


async def sink(node: Node, rank: Worker, sources: list[Served]) -> Sink:
    """Bind a reader that knows the sources and the plan to read them."""
    mover, _ = await bind(node, rank)
    remote: dict[Rank, RankLayout] = {s.worker.spec.rank: s.worker.layout for s in sources}
    plan = make_plan(rank.spec, rank.layout, sources[0].worker.spec, remote)
    reader = Sink(rank, node, mover, plan)
    mover.send(LoadPlan(digest=plan.digest, encoded=encode_plan(plan)))
    for source in sources:
        reader.know(source.mover.agent, source.bound.metadata, source.fence.metadata)
    return reader


Connect = Callable[..., Awaitable[tuple[Served, Sink]]]  # the fixture of the movers' tests


class Pools:
    """The nodes that the tests of a session share: one for each transport.

    A forkserver's start takes a second, its next mover 40 ms.
    """

    def __init__(self) -> None:
        self._nodes: dict[tuple[str, str], Node] = {}

    async def __aenter__(self) -> Pools:
        return self

    async def __aexit__(self, *_: object) -> None:
        for node in self._nodes.values():
            await node.__aexit__()
        assert started_with("KVXFERD_TEST", SHARED_MARK) == {}

    async def node(self, name: str, transport: str = "cma", read_way: str = "direct") -> Node:
        """Return a node whose movers read over that transport ("cma" or "tcp"), from now on in that way."""
        key = (name, transport)
        if key not in self._nodes:
            environment = {"KVXFERD_TEST": SHARED_MARK, **TRANSPORTS[transport]}
            made = Node(name, environment)
            self._nodes[key] = await made.__aenter__()
        self._nodes[key].read_way = ReadWay(read_way)
        return self._nodes[key]

    async def rest(self) -> None:
        """A test is over."""
        for node in self._nodes.values():
            await node.rest()

    def num_fds(self) -> int:
        """Return how many descriptors the pools hold now."""
        return sum(node.num_fds() for node in self._nodes.values())


def orphaned_directories() -> list[str]:
    """Return the shared memory directories that dead forkservers of this process have left."""
    directories = [Path(f"/dev/shm/kvxferd-movers-{pid}") for pid in _FORKSERVERS if not state_of(pid)]
    return [str(directory) for directory in directories if directory.exists()]


@contextmanager
def leaving_nothing(shared_fds: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Assert that the body leaves no process, descriptor or shared memory.

    `shared_fds` returns how many descriptors are held by what lives on.
    """
    before = num_open_fds(collect=False) - shared_fds()
    yield
    assert started_with("KVXFERD_TEST", MARK) == {}
    assert num_open_fds(collect=False) - shared_fds() <= before
    assert orphaned_directories() == []
