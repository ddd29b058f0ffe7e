"""Two real movers, one to read from and one to read with, for any number of layouts."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import numpy as np

from kvxferd.ids import AgentName, GroupName, PullId, Rank, RegionId, SessionId
from kvxferd.layout import EngineSpec, PackedBlocks, RankLayout, RegionSpec
from kvxferd.memory import SealedMemory
from kvxferd.mover.supervisor.handle import MoverHandle
from kvxferd.plan import encode_plan, make_plan
from kvxferd.wire.common import RegionAddress
from kvxferd.wire.limits import FENCE_PAGE_BYTES
from kvxferd.wire.mover import (
    Bind,
    Bound,
    FenceLocation,
    FenceMapped,
    LoadPlan,
    LoadRemote,
    MapFence,
    Polling,
    PullDone,
    PullOutcome,
    ReadWay,
    SetPolling,
    SourceRank,
    StartPull,
)
from kvxferd.wire.worker import RegionExport
from tests.support.fence_page import SharedFencePage
from tests.support.mover_harness import Node

POOL = RegionId("pool")
POOL_BYTES = 64 << 20
WAIT_S = 30.0
T = TypeVar("T")
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
Lists = Mapping[GroupName, PackedBlocks]


class Side:
    """A mover bound to one large region, in which any layout finds its place."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.memory = SealedMemory.create(POOL_BYTES, "kvxferd-random")
        self.deliveries = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self.array: Bytes = np.frombuffer(self.memory.buffer, dtype=np.uint8)
        self.mover: MoverHandle
        self.bound: Bound

    async def bind(self, pidfd: int) -> None:
        self.mover = await asyncio.wait_for(self.node.pool.acquire(), WAIT_S)
        export = RegionExport(region=POOL, size_bytes=POOL_BYTES, fd_index=0)
        fds = (self.memory.fd, self.deliveries[1].fileno(), pidfd)
        self.mover.send(Bind(regions=(export,), read_way=self.node.read_way), fds)
        self.bound = await self.node.received(self.mover, Bound)

    @property
    def address(self) -> int:
        return self.bound.regions[0].address


class Movers:
    """The pair. Its event loop runs in a thread, so that hypothesis can call it."""

    def __init__(self, read_way: ReadWay = ReadWay.DIRECT) -> None:
        self._read_way = read_way
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._numbers = itertools.count(1)
        self._process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        self._pidfd = os.pidfd_open(self._process.pid)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(2 * WAIT_S)

    def start(self) -> None:
        self._thread.start()
        self.run(self._start())

    async def _start(self) -> None:
        sink = Node("sink", read_way=self._read_way)
        self.source, self.sink = Side(Node("source")), Side(sink)
        for side in (self.source, self.sink):
            await side.node.__aenter__()
            await side.bind(self._pidfd)
        self.page = SharedFencePage()
        self.word = os.urandom(16)
        self.page.write(0, self.word)
        mover = self.source.mover
        mover.send(MapFence(session=SessionId(1), size_bytes=FENCE_PAGE_BYTES), (self.page.fd,))
        self.fence = await self.source.node.received(mover, FenceMapped)
        mover.send(SetPolling(on=True, token=1))
        await self.source.node.received(mover, Polling)
        for metadata in (self.source.bound.metadata, self.fence.metadata):
            self.sink.mover.send(LoadRemote(agent=mover.agent, metadata=metadata))

    def stop(self) -> None:
        self.run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._process.kill()
        self._process.wait()
        os.close(self._pidfd)

    async def _stop(self) -> None:
        for side in (self.source, self.sink):
            await side.node.__aexit__()
            for end in side.deliveries:
                end.close()
        self.page.close()

    # --- pulling

    def pull(
        self,
        spec: EngineSpec,
        layout: RankLayout,
        remote_spec: EngineSpec,
        remote: Mapping[Rank, RankLayout],
        *,
        mine: Lists,
        theirs: Lists,
        num_tokens: int,
        addresses: Mapping[Rank, Mapping[RegionId, int]],
    ) -> PullOutcome:
        """Plan, and have the real mover do it. `layout` is in the pool; `addresses` are offsets there."""
        plan = make_plan(spec, layout, remote_spec, remote)
        agent: AgentName = self.source.mover.agent
        sources = tuple(
            SourceRank(
                rank,
                agent,
                tuple(
                    RegionAddress(r.region, self.source.address + addresses[rank][r.region], r.size_bytes)
                    for r in remote[rank].regions
                ),
            )
            for rank in plan.sources
        )
        number = PullId(next(self._numbers))
        self.sink.mover.send(LoadPlan(digest=plan.digest, encoded=encode_plan(plan)))
        start = StartPull(
            pull=number,
            plan=plan.digest,
            sources=sources,
            local=dict(mine),
            remote=dict(theirs),
            num_tokens=num_tokens,
            fence=FenceLocation(agent, self.fence.address, self.word),
        )
        return self.run(self._outcome(start))

    async def _outcome(self, start: StartPull) -> PullOutcome:
        self.sink.mover.send(start)
        done = await self.sink.node.received(self.sink.mover, PullDone)
        assert done.pull == start.pull
        return done.outcome


@contextmanager
def real_movers(read_way: ReadWay = ReadWay.DIRECT) -> Iterator[Movers]:
    movers = Movers(read_way)
    movers.start()
    try:
        yield movers
    finally:
        movers.stop()


def in_pool(layout: RankLayout, offset: int = 0) -> RankLayout:
    """The same layout with all its regions one after another in the pool."""
    at = offsets_of(layout, offset)
    tensors = tuple(
        msgspec.structs.replace(t, region=POOL, offset=t.offset + at[t.region]) for t in layout.tensors
    )
    regions = (RegionSpec(POOL, POOL_BYTES),)
    return msgspec.structs.replace(layout, tensors=tensors, regions=regions)


def offsets_of(layout: RankLayout, offset: int) -> dict[RegionId, int]:
    """Where each region begins when they follow one another from `offset` on."""
    found = {}
    for region in layout.regions:
        found[region.region] = offset
        offset += region.size_bytes
    assert offset <= POOL_BYTES, "the pool is too small for this engine"
    return found
