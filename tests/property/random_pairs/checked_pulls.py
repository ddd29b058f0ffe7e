"""Pulls of any layouts through two real movers, and the check of every byte that they could touch."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np

from kvxferd.ids import GroupName, PullId, Rank, RegionId
from kvxferd.layout import EngineSpec, PackedBlocks, RankLayout, RegionSpec
from kvxferd.mover.supervisor.handle import MoverHandle
from kvxferd.plan import check_request, encode_plan, make_plan
from kvxferd.wire.common import RegionAddress
from kvxferd.wire.mover import LoadPlan, LoadRemote, PullDone, PullOutcome, ReadWay, SourceRank, StartPull
from tests.support import brute_force
from tests.support.mover_harness import WORD, Node, Served, Worker, bind, serve, worker_of

POOL = RegionId("pool")
POOL_BYTES = 64 << 20
# Of one large region, in which any layout finds its place.
POOL_LAYOUT = RankLayout(0, 0, groups=(), tensors=(), regions=(RegionSpec(POOL, POOL_BYTES),))
WAIT_S = 30.0
T = TypeVar("T")
Lists = Mapping[GroupName, PackedBlocks]
Offsets = Mapping[RegionId, int]


class Movers:
    """The pair: `source` is read, `sink` reads. Its event loop runs in a thread, for hypothesis to call."""

    source: Served
    sink: Worker
    _mover: MoverHandle  # the sink's

    def __init__(self, read_way: ReadWay) -> None:
        self._nodes = Node("source"), Node("sink", read_way=read_way)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._numbers = itertools.count(1)
        self._thread.start()
        self._run(self._start())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(2 * WAIT_S)

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
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        for node in self._nodes:
            await node.__aexit__()
        self.source.close()
        for rank in (self.source.worker, self.sink):
            rank.close()

    def transfer(
        self,
        spec: EngineSpec,
        own: RankLayout,
        source_spec: EngineSpec,
        source: Mapping[Rank, RankLayout],
        *,
        mine: Lists,
        theirs: Lists,
        num_tokens: int,
    ) -> int:
        """Pull one rank and check the whole memory; return the bytes moved. Raises PlanError."""
        layout = in_pool(own)
        plan = make_plan(spec, layout, source_spec, source)
        check_request(plan, mine, theirs, num_tokens)
        offsets = place(source)
        fill(self.source.worker.array, source, offsets, theirs)
        size = sum(region.size_bytes for region in own.regions)
        view = self.sink.array[: size + 4096]  # and what lies behind it
        view[:] = np.random.default_rng(7).integers(0, 256, len(view), dtype=np.uint8)
        before = view.copy()
        (pool,) = self.source.bound.regions
        regions = {
            rank: tuple(
                RegionAddress(r.region, pool.address + offsets[rank][r.region], r.size_bytes)
                for r in source[rank].regions
            )
            for rank in plan.sources
        }
        agent = self.source.mover.agent
        self._mover.send(LoadPlan(digest=plan.digest, encoded=encode_plan(plan)))
        start = StartPull(
            pull=PullId(next(self._numbers)),
            plan=plan.digest,
            sources=tuple(SourceRank(rank, agent, places) for rank, places in regions.items()),
            local=dict(mine),
            remote=dict(theirs),
            num_tokens=num_tokens,
            fence=self.source.place(0, WORD),
        )
        outcome = self._run(self._outcome(start))
        assert outcome.delivered, outcome
        moved = check(view, before, layout, mine, source, theirs)
        assert moved == outcome.bytes
        return moved

    async def _outcome(self, start: StartPull) -> PullOutcome:
        self._mover.send(start)
        done = await self._nodes[1].received(self._mover, PullDone)
        assert done.pull == start.pull
        return done.outcome


def in_pool(layout: RankLayout) -> RankLayout:
    """The same layout with all its regions one after another in the pool."""
    at = _offsets_of(layout, 0)
    tensors = tuple(
        msgspec.structs.replace(t, region=POOL, offset=t.offset + at[t.region]) for t in layout.tensors
    )
    return msgspec.structs.replace(layout, tensors=tensors, regions=POOL_LAYOUT.regions)


def place(ranks: Mapping[Rank, RankLayout]) -> dict[Rank, Offsets]:
    """Give every remote rank a place of its own in the source's pool."""
    found, offset = {}, 0
    for rank in sorted(ranks):
        found[rank] = _offsets_of(ranks[rank], offset)
        offset += sum(region.size_bytes for region in ranks[rank].regions) + 64
    return found


def _offsets_of(layout: RankLayout, offset: int) -> Offsets:
    """Where each region begins when they follow one another from `offset` on."""
    found = {}
    for region in layout.regions:
        found[region.region] = offset
        offset += region.size_bytes
    assert offset <= POOL_BYTES, "the pool is too small for this engine"
    return found


def fill(
    array: np.ndarray, ranks: Mapping[Rank, RankLayout], offsets: Mapping[Rank, Offsets], theirs: Lists
) -> None:
    """Noise everywhere, and each listed coordinate's own byte where it lies."""
    end = max(offsets[rank][r.region] + r.size_bytes for rank in ranks for r in ranks[rank].regions)
    array[:end] = np.random.default_rng(3).integers(0, 256, end, dtype=np.uint8)
    for rank, layout in ranks.items():
        for coordinate, (region, at) in brute_force.places(layout, theirs).items():
            array[offsets[rank][region] + at] = brute_force.value(coordinate)


def check(
    view: np.ndarray,
    before: np.ndarray,
    layout: RankLayout,
    mine: Lists,
    ranks: Mapping[Rank, RankLayout],
    theirs: Lists,
) -> int:
    """Every coordinate that both sides list holds its byte, no other byte has changed; returns how many."""
    held = set().union(*(brute_force.places(other, theirs) for other in ranks.values()))
    own = brute_force.places(layout, mine)
    return int(brute_force.check_arrived({POOL: view}, {POOL: before}, own, held)[POOL].sum())
