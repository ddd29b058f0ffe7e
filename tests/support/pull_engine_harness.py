"""A pull engine over the in-memory transport."""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxferd.ids import AgentName, Digest, EngineId, Generation, PullId, Rank, RegionId
from kvxferd.layout import EngineSpec, RankLayout
from kvxferd.layout.presets import attention_layout
from kvxferd.memory.device_pool import DevicePool
from kvxferd.mover.chunks.chunk_pool import ChunkPool, ChunkState
from kvxferd.mover.chunks.device_scatter import DeviceScatterer
from kvxferd.mover.chunks.scatterer import Scatterer, ScatterJob
from kvxferd.mover.reads.pull_engine import PullEngine
from kvxferd.mover.transport.base import MemoryRange
from kvxferd.mover.transport.staging import StagedTransport
from kvxferd.plan import MAX_RUNS, encode_plan, make_plan
from kvxferd.wire.common import RegionAddress
from kvxferd.wire.mover import (
    FenceLocation,
    FromMover,
    PullDone,
    PullOutcome,
    PullQuiesced,
    ReadWay,
    SourceRank,
    StartPull,
)
from tests.support.fake_driver import FakeDriver
from tests.support.memory_transport import Fabric, MemoryTransport
from tests.support.mover_harness import packed

WORD = bytes(range(16))
BLOCKS = 512
HEAD = 16  # bytes of one head of one token
DIGEST = Digest("plan")


def spec(engine: str, tp: int, rank: int) -> EngineSpec:
    return EngineSpec(
        engine_id=EngineId(engine),
        generation=Generation("g"),
        num_layers=2,
        tp_size=tp,
        tp_rank=rank,
        num_kv_heads=2,
    )


def layout(of: EngineSpec, order: str = "HND") -> RankLayout:
    return attention_layout(
        spec=of, num_kv_heads=2, head_dim=8, block_tokens=4, num_blocks=BLOCKS, layout=order
    )


class Memory:
    """Registered memory of one agent."""

    def __init__(self, transport: MemoryTransport, size: int) -> None:
        self.page = mmap.mmap(-1, size)
        self.span = MemoryRange(ctypes.addressof(ctypes.c_char.from_buffer(self.page)), size)
        transport.register(self.span)
        self.array = np.frombuffer(self.page, dtype=np.uint8)


class FakeDeviceMemory:
    """The same in the fake driver's memory."""

    def __init__(self, transport: MemoryTransport, driver: FakeDriver, size: int) -> None:
        device = driver.devices()[1]
        self.uuid = device.uuid
        self.pool = DevicePool(device.uuid, driver)
        self.span = MemoryRange(self.pool.allocate(size).address, size, driver.mem_type, device.ordinal)
        transport.register(self.span)
        memory = (ctypes.c_uint8 * size).from_address(self.span.address)
        self.array = np.ctypeslib.as_array(memory)


class Bench:
    """A reader of TP 1 and an engine of TP 2 that it reads, on a fabric."""

    def __init__(
        self,
        max_runs: int = MAX_RUNS,
        chunk_bytes: int = 0,
        max_chunks: int = 4,
        scatterer: Scatterer | None = None,
        always_covers: bool = True,
        layout_here: str = "",
        driver: FakeDriver | None = None,
        flush: Callable[[], None] | None = None,
    ) -> None:
        """`chunk_bytes`: of chunks, for covering reads; the reader's tokens then lie before its heads.

        `driver`: the reader's memory is its second device's. `flush`: as `PullEngine.bind`.
        """
        self.now = 0.0
        self.fabric = Fabric()
        self.agents = [AgentName(f"p/{rank}") for rank in range(2)]
        self.transports = [MemoryTransport(self.fabric, agent) for agent in self.agents]
        remote = {Rank(0, r): layout(spec("P", 2, r)) for r in range(2)}
        self.remote = [
            Memory(t, one.regions[0].size_bytes)
            for t, one in zip(self.transports, remote.values(), strict=True)
        ]
        self.fence = Memory(self.transports[0], 4096)
        self.fence.page[0:16] = WORD
        for seed, memory in enumerate(self.remote):
            memory.array[:] = np.random.default_rng(seed).integers(1, 256, len(memory.array), dtype=np.uint8)
        self.reader = AgentName("d/0")
        transport = MemoryTransport(self.fabric, self.reader)
        ours = layout(spec("D", 1, 0), layout_here or ("NHD" if chunk_bytes else "HND"))
        size = ours.regions[0].size_bytes
        self.local = Memory(transport, size) if driver is None else FakeDeviceMemory(transport, driver, size)
        self.staged = StagedTransport(transport, lambda: self.now)
        self.chunks = ChunkPool(self.staged, chunk_bytes, max_chunks)
        self.engine = PullEngine(
            self.staged,
            self.chunks,
            clock=lambda: self.now,
            max_runs=max_runs,
            scatterer=scatterer,
        )
        span = self.local.span
        regions = [
            RegionAddress(RegionId("kv"), span.address, span.size_bytes, span.device, span.mem_type),
        ]
        self.device = None
        if driver is not None:
            self.device = DeviceScatterer(driver, driver.device_of(span.address), regions, flush)
        read_way = ReadWay.COVERING if always_covers else ReadWay.AUTO
        self.engine.bind(regions, flush, self.device, read_way if chunk_bytes else ReadWay.DIRECT)
        plan = make_plan(spec("D", 1, 0), ours, spec("P", 2, 0), remote)
        self.engine.load_plan(DIGEST, encode_plan(plan))
        self.load()
        self.reported: list[FromMover] = []
        self._next = 0

    def close(self) -> None:
        """Free what the fake driver made. No other method may be called afterwards."""
        self.engine.close()
        if isinstance(self.local, FakeDeviceMemory):
            self.local.array = np.empty(0, dtype=np.uint8)
            self.local.pool.close()

    def regions_of(self, number: int) -> tuple[RegionAddress, ...]:
        """Return a remote rank's memory, as its mover describes it."""
        span = self.remote[number].span
        return (RegionAddress(RegionId("kv"), *span[:2]),)

    def load(self) -> None:
        for agent, transport, memory in zip(self.agents, self.transports, self.remote, strict=True):
            spans = [memory.span, self.fence.span] if agent == self.agents[0] else [memory.span]
            self.engine.remote_agents.load(agent, transport.metadata(spans))

    def start(self, ids: Sequence[int], word: bytes = WORD, plan: Digest = DIGEST) -> PullId:
        """Start a pull of these blocks into the same here."""
        self._next += 1
        number = PullId(self._next)
        self.engine.start(
            StartPull(
                pull=number,
                plan=plan,
                sources=tuple(
                    SourceRank(Rank(0, r), agent, self.regions_of(r)) for r, agent in enumerate(self.agents)
                ),
                local=packed(ids),
                remote=packed(ids),
                num_tokens=4 * len(ids),
                fence=FenceLocation(self.agents[0], self.fence.span.address, word),
            )
        )
        return number

    def pull(self, ids: range, *arguments: Any, **more: Any) -> PullDone:
        """Start a pull, run until nothing moves, and return how it ended."""
        number = self.start(ids, *arguments, **more)
        self.run()
        return self.outcomes()[number]

    def run(self, max_steps: int = 100_000) -> None:
        """Step until nothing moves for a while, which is the end unless something is stalled."""
        quiet = 0
        for _ in range(max_steps):
            if not self.engine.is_busy or quiet > 50:
                break
            quiet = 0 if self.engine.step() else quiet + 1
            self.drain()
        self.drain()

    def drain(self) -> None:
        self.reported += self.engine.outbox
        self.engine.outbox.clear()

    def outcomes(self) -> dict[PullId, PullOutcome]:
        done = [message for message in self.reported if isinstance(message, PullDone)]
        assert len({d.pull for d in done}) == len(done), "a pull ended twice"
        return {d.pull: d.outcome for d in done}

    def quiet(self) -> list[PullId]:
        return [message.pull for message in self.reported if isinstance(message, PullQuiesced)]


def scattered(num: int) -> range:
    """Every second block: no two of them merge."""
    return range(0, 2 * num, 2)


def blocks_here(bench: Bench) -> npt.NDArray[np.uint8]:
    """Return the reader's blocks: (tensors, blocks, tokens, heads, bytes)."""
    return bench.local.array.reshape(4, BLOCKS, 4, 2, HEAD)


def check_arrived(bench: Bench, ids: range) -> None:
    """Each head of each token lies where its rank had it, and no other block was touched."""
    mine = blocks_here(bench)
    for rank, memory in enumerate(bench.remote):
        theirs = memory.array.reshape(4, BLOCKS, 4, HEAD)
        assert np.array_equal(mine[..., rank, :][:, list(ids)], theirs[:, list(ids)])
    others = [block for block in range(BLOCKS) if block not in ids]
    assert not mine[:, others].any()


def states(bench: Bench) -> dict[ChunkState, int]:
    """Return how many chunks are in each state that any is in."""
    return {state: num for state in ChunkState if (num := bench.chunks.count(state))}


class ManualScatterer:
    """Makes a copy when the test says so, of the job that was queued first."""

    def __init__(self) -> None:
        self.jobs: deque[ScatterJob] = deque()

    def start(self, job: ScatterJob) -> None:
        self.jobs.append(job)

    def step(self) -> bool:
        return False

    def help(self) -> bool:
        return False

    def copy_once(self) -> None:
        if self.jobs:
            self.jobs[0].run_piece()
            if self.jobs[0].is_over:
                self.jobs.popleft()

    def run_all(self) -> None:
        while self.jobs:
            self.copy_once()

    def close(self) -> None:
        """Nothing runs."""
