"""Two real movers, one to read from and one to read with, for any number of layouts."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from kvxferd.ids import AgentName, GroupName, PullId, Rank, RegionId
from kvxferd.layout import EngineSpec, PackedBlocks, RankLayout, RegionSpec
from kvxferd.mover.supervisor.handle import MoverHandle
from kvxferd.plan import encode_plan, make_plan
from kvxferd.wire.common import RegionAddress
from kvxferd.wire.mover import LoadPlan, LoadRemote, PullDone, PullOutcome, ReadWay, SourceRank, StartPull
from tests.support.mover_harness import WORD, Node, Served, Worker, bind, serve, worker_of

POOL = RegionId("pool")
POOL_BYTES = 64 << 20
# Of one large region, in which any layout finds its place.
POOL_LAYOUT = RankLayout(0, 0, groups=(), tensors=(), regions=(RegionSpec(POOL, POOL_BYTES),))
WAIT_S = 30.0
T = TypeVar("T")
Lists = Mapping[GroupName, PackedBlocks]


class Movers:
    """The pair: `source` is read, `sink` reads. Its event loop runs in a thread, for hypothesis to call."""

    source: Served
    sink: Worker

    def __init__(self, read_way: ReadWay = ReadWay.DIRECT) -> None:
        self._nodes = Node("source"), Node("sink", read_way=read_way)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._numbers = itertools.count(1)
        self._mover: MoverHandle  # the sink's

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(2 * WAIT_S)

    def start(self) -> None:
        self._thread.start()
        self.run(self._start())

    async def _start(self) -> None:
        for node in self._nodes:
            await node.__aenter__()
        spec = EngineSpec("pool", "g1", num_layers=1)  # type: ignore[arg-type]
        self.source = await serve(self._nodes[0], worker_of(spec, POOL_LAYOUT))
        self.source.page.write(0, WORD)
        self.sink = worker_of(spec, POOL_LAYOUT)
        self._mover, _ = await bind(self._nodes[1], self.sink)
        for metadata in (self.source.bound.metadata, self.source.fence.metadata):
            self._mover.send(LoadRemote(agent=self.source.mover.agent, metadata=metadata))

    def stop(self) -> None:
        self.run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        for node in self._nodes:
            await node.__aexit__()
        self.source.close()
        for rank in (self.source.worker, self.sink):
            rank.close()

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
        (pool,) = self.source.bound.regions
        places = {
            rank: tuple(
                RegionAddress(r.region, pool.address + addresses[rank][r.region], r.size_bytes)
                for r in remote[rank].regions
            )
            for rank in plan.sources
        }
        number = PullId(next(self._numbers))
        self._mover.send(LoadPlan(digest=plan.digest, encoded=encode_plan(plan)))
        start = StartPull(
            pull=number,
            plan=plan.digest,
            sources=tuple(SourceRank(rank, agent, regions) for rank, regions in places.items()),
            local=dict(mine),
            remote=dict(theirs),
            num_tokens=num_tokens,
            fence=self.source.place(0, WORD),
        )
        return self.run(self._outcome(start))

    async def _outcome(self, start: StartPull) -> PullOutcome:
        self._mover.send(start)
        done = await self._nodes[1].received(self._mover, PullDone)
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
