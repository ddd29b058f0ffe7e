"""Two nodes' movers in one test: real processes, real memory, no daemon."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from kvxferd.errors import MoverError
from kvxferd.ids import (
    AgentName,
    BootId,
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
from kvxferd.mover.supervisor.pool import MoverPool
from kvxferd.mover.supervisor.pool_events import Tick
from kvxferd.plan import Plan, encode_plan, make_plan
from kvxferd.wire.block_id_parts import split_block_ids
from kvxferd.wire.limits import FENCE_PAGE_BYTES, FENCE_WORD_BYTES
from kvxferd.wire.mover import (
    Bind,
    Bound,
    ChunkMemoryGranted,
    ChunkMemoryWanted,
    FenceLocation,
    FenceMapped,
    FromMover,
    LoadPlan,
    LoadRemote,
    MapFence,
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
from tests.support.open_fds import num_open_fds

DEADLINE_S = 20.0
MARK = f"rig-of-{os.getpid()}"  # in the environment of every process of a rig
GROUP = GroupName("full")
T = TypeVar("T")
_NUMBERS = itertools.count(1)


async def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Return once `holds()` is true, of what no event of a `Node` tells; fail with `what` if it never is."""
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:g} s: {what}"
        await asyncio.sleep(0.01)


def marked_processes() -> list[str]:
    """Return what each living process of a rig of this run is: its pid and its command line."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                if MARK.encode() in (process / "environ").read_bytes():
                    command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found.append(f"{process.name}: {command.strip()}")
            except OSError:  # it went while we looked
                continue
    return found


class AwaitedPool(MoverPool):
    """A pool for tests that wait for their movers, and that change its size."""

    async def acquire(self) -> MoverHandle:
        """Return a mover. Raises MoverError."""
        result: asyncio.Future[MoverHandle | MoverError] = asyncio.get_running_loop().create_future()
        self.request(result.set_result)
        mover = await asyncio.shield(result)
        if isinstance(mover, MoverError):
            raise mover
        return mover

    def resize(self, size: int) -> None:
        """Keep that many ready from now on, and fork them now."""
        self._decisions.size = size
        self._decisions._fill()
        self._feed(Tick())


class Node:
    """A pool, with what its movers said."""

    read_way = ReadWay.DIRECT  # of ranks that are bound from now on

    def __init__(
        self,
        name: str,
        size: int = 1,
        environment: Mapping[str, str] | None = None,
        chunk_memory: int = 1 << 30,
        backend: Backend = DEFAULT_BACKEND,
        read_way: ReadWay | None = None,
    ) -> None:
        """`chunk_memory`: the bytes that each mover is granted for covering reads, if it wants so many."""
        if read_way is not None:
            self.read_way = read_way
        self._chunk_memory = chunk_memory
        self.said: list[tuple[MoverId, FromMover]] = []
        self.exits: list[MoverId] = []
        self.chunk_reports: dict[MoverId, ChunkMemoryWanted] = {}  # the last one of each
        self._changed = asyncio.Event()
        self.pool = AwaitedPool(
            boot=BootId(name),
            size=size,
            on_message=self._message,
            on_exit=self._exit,
            environment={"KVXFERD_TEST": MARK, **(environment or {})},
            backend=backend,
        )

    async def __aenter__(self) -> Node:
        await self.pool.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.wait_for(self.pool.stop(), DEADLINE_S)

    def _message(self, mover: MoverId, message: FromMover) -> None:
        if isinstance(message, ChunkMemoryWanted):
            self.chunk_reports[mover] = message
            self._changed.set()
            size = min(message.wanted_bytes, self._chunk_memory)
            self.pool._handles[mover].send(ChunkMemoryGranted(size_bytes=size))
            return
        self.said.append((mover, message))
        self._changed.set()

    def _exit(self, mover: MoverId) -> None:
        self.exits.append(mover)
        self._changed.set()

    async def until(self, found: Callable[[], T | None], deadline_s: float = DEADLINE_S) -> T:
        """Wait for something to be said or to happen."""
        async with asyncio.timeout(deadline_s):
            while (value := found()) is None:
                self._changed.clear()
                await self._changed.wait()
            return value

    async def heard(self, mover: MoverHandle, kind: type[T], deadline_s: float = DEADLINE_S) -> T:
        """Wait for the first message of a kind, and take it out."""

        def find() -> T | None:
            for index, (who, message) in enumerate(self.said):
                if who == mover.mover_id and isinstance(message, kind):
                    del self.said[index]
                    return message
            return None

        return await self.until(find, deadline_s)

    async def gone(self, mover: MoverHandle, deadline_s: float = DEADLINE_S) -> None:
        """Wait for a mover's exit to be told."""
        await self.until(lambda: True if mover.mover_id in self.exits else None, deadline_s)


@dataclass
class Worker:
    """A rank: its layout, its memory, and a process that stands for it."""

    spec: EngineSpec
    layout: RankLayout
    memory: SealedMemory
    process: subprocess.Popen[bytes]
    pidfd: int

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
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    memory = SealedMemory.create(own.regions[0].size_bytes, "kvxferd-test")
    return Worker(spec, own, memory, process, os.pidfd_open(process.pid))


def packed(ids: list[int] | range) -> dict[GroupName, PackedBlocks]:
    return {GROUP: PackedBlocks(pack_ids(list(ids)))}


async def bind(node: Node, rank: Worker, notices: int | None = None) -> tuple[MoverHandle, Bound]:
    """Take a mover and give it the rank's memory, and the socket for its notices."""
    mover = await asyncio.wait_for(node.pool.acquire(), DEADLINE_S)
    more = () if notices is None else (notices,)
    bind = Bind(regions=rank.export(), notices=notices is not None, read_way=node.read_way)
    mover.send(bind, (rank.memory.fd, *more, rank.pidfd))
    return mover, await node.heard(mover, Bound)


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
    fence = await node.heard(mover, FenceMapped)
    mover.send(SetPolling(on=True, token=5))
    assert (await node.heard(mover, Polling)).token == 5
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
        done = await self.node.heard(self.mover, PullDone, deadline_s)
        assert done.pull == number
        return done.outcome


async def sink(node: Node, rank: Worker, sources: list[Served], notices: int | None = None) -> Sink:
    """Bind a reader that knows the sources and the plan to read them."""
    mover, _ = await bind(node, rank, notices)
    remote: dict[Rank, RankLayout] = {s.worker.spec.rank: s.worker.layout for s in sources}
    plan = make_plan(rank.spec, rank.layout, sources[0].worker.spec, remote)
    reader = Sink(rank, node, mover, plan)
    mover.send(LoadPlan(digest=plan.digest, encoded=encode_plan(plan)))
    for source in sources:
        reader.know(source.mover.agent, source.bound.metadata, source.fence.metadata)
    return reader


def orphaned_directories() -> list[str]:
    """Shared memory directories whose owner is gone."""
    return [
        made.name
        for made in Path("/dev/shm").glob("kvxferd-movers-*")
        if not Path("/proc", made.name.rpartition("-")[2]).exists()
    ]


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """Assert that the body leaves no process, descriptor or shared memory."""
    before = num_open_fds(collect=False)
    yield
    assert marked_processes() == []
    assert num_open_fds(collect=False) <= before
    assert orphaned_directories() == []
