"""Chunks that cannot be made, given back, or read to the end: what they cost the pulls and the node."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.ids import AgentName, Digest, PullId, Rank, RegionId
from kvxferd.mover.chunks.chunk_pool import IDLE_S, RETRY_S, SLOW_S, ChunkState
from kvxferd.mover.chunks.covering import CoverSlicer
from kvxferd.mover.chunks.scatterer import Scatterer, ScatterJob
from kvxferd.mover.reads.pull_engine import MAX_INFLIGHT, STALLED_S
from kvxferd.mover.transport.base import MemoryRange, TransportError
from kvxferd.plan import encode_plan, make_plan
from kvxferd.plan.covering import Stretches
from kvxferd.plan.stretches import Copies, StretchForm
from kvxferd.wire.common import RegionAddress
from kvxferd.wire.mover import ChunkMemoryRequest, FenceLocation, SourceRank, StartPull
from tests.support.memory_transport import MemoryTransport
from tests.support.mover_harness import packed
from tests.support.pull_engine_harness import WORD, Bench, Memory, layout, scattered, spec

CHUNK = 64 << 10


def reader_of(bench: Bench) -> MemoryTransport:
    return bench.fabric.agents[bench.reader]


class Refusing:
    """Stands for a transport's `register` or `deregister`."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, span: MemoryRange) -> None:
        self.num_calls += 1
        raise TransportError("no memory may be locked", settled=True)


def reports_of(bench: Bench) -> list[ChunkMemoryRequest]:
    reports: list[ChunkMemoryRequest] = []
    bench.chunks._report = reports.append
    return reports


def test_a_chunk_that_cannot_be_made_is_not_tried_at_each_step() -> None:
    """The pull reads directly, at once. A later one tries again."""
    bench = Bench(chunk_bytes=CHUNK)
    register = reader_of(bench).register
    reader_of(bench).register = refusing = Refusing()  # type: ignore[method-assign]
    number = bench.start(scattered(8))
    bench.run()
    assert refusing.num_calls == 1
    assert bench.outcomes()[number].delivered
    assert bench.outcomes()[number].covered_bytes == 0
    reader_of(bench).register = register  # type: ignore[method-assign]
    bench.now += RETRY_S
    again = bench.start(scattered(8))
    bench.run()
    assert bench.outcomes()[again].covered_bytes == bench.outcomes()[again].bytes


def test_a_chunk_that_the_library_does_not_let_go_is_lost() -> None:
    """It is counted and reported once, however often the mover is to give memory back."""
    bench = Bench(chunk_bytes=CHUNK)
    bench.fabric.polls_per_read = 2
    bench.start(scattered(8))
    bench.run()
    reports = reports_of(bench)
    reader_of(bench).deregister = refusing = Refusing()  # type: ignore[method-assign]
    num = bench.chunks.count(ChunkState.FREE)
    assert num > 1
    for _ in range(3):
        bench.chunks.set_grant(0, bench.now)
        bench.now += IDLE_S
        bench.chunks.release_idle(bench.now)
    assert refusing.num_calls == num
    assert bench.chunks.count(ChunkState.LOST) == num
    assert reports[-1].num_held == reports[-1].num_lost == num
    assert len(reports) <= num + 2  # each lost chunk, the smaller grant, and that none is wanted
    number = bench.start(scattered(8))
    bench.engine.step()
    bench.chunks.set_grant(num, bench.now)
    bench.run()
    assert bench.outcomes()[number].delivered


@pytest.mark.parametrize("num_lost", [1, 3])
def test_later_pulls_do_not_wait_because_a_chunk_is_lost(num_lost: int) -> None:
    bench = Bench(chunk_bytes=CHUNK)
    bench.fabric.polls_per_read = 2
    for _ in range(num_lost):
        bench.start(scattered(8))
        bench.engine.step()
        bench.fabric.errors[bench.agents[1]] = TransportError("odd", settled=False)
        bench.run()
    assert bench.chunks.count(ChunkState.LOST) == num_lost
    bench.now += 2 * SLOW_S
    outcome = bench.pull(scattered(8))
    assert outcome.delivered
    assert outcome.covered_bytes == (outcome.bytes if num_lost == 1 else outcome.bytes // 2)


def test_any_number_of_pulls_from_a_stopped_source_leave_the_others_their_turn() -> None:
    """Each has direct reads that do not end: together more than may be in flight."""
    bench = Bench()
    agent = AgentName("q/0")
    transport = MemoryTransport(bench.fabric, agent)
    theirs = layout(spec("Q", 1, 0))
    memory = Memory(transport, theirs.regions[0].size_bytes)
    fence = Memory(transport, 4096)
    fence.page[0:16] = WORD
    plan = make_plan(spec("D", 1, 0), layout(spec("D", 1, 0)), spec("Q", 1, 0), {Rank(0, 0): theirs})
    bench.engine.load_plan(Digest("q"), encode_plan(plan))
    bench.engine.remote_agents.load(agent, transport.metadata([memory.span, fence.span]))
    bench.fabric.stalled |= set(bench.agents)
    for _ in range(MAX_INFLIGHT):
        bench.start(scattered(100))
    bench.run()
    assert bench.engine.num_inflight == MAX_INFLIGHT
    bench.now += 2 * STALLED_S
    other = PullId(1000)
    bench.engine.start(
        StartPull(
            pull=other,
            plan=Digest("q"),
            sources=(SourceRank(Rank(0, 0), agent, (RegionAddress(RegionId("kv"), *memory.span[:2]),)),),
            local=packed(range(4)),
            remote=packed(range(4)),
            num_tokens=16,
            fence=FenceLocation(agent, fence.span.address, WORD),
        )
    )
    bench.run()
    assert bench.outcomes()[other].delivered


def test_scatters_run_in_the_engines_steps_where_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    bench = Bench(chunk_bytes=CHUNK, scatterer=Scatterer())
    assert bench.pull(scattered(100)).delivered


class Image:
    """Stands for what a scatter refers to."""


def test_a_cancelled_scatter_keeps_nothing() -> None:
    """A chunk that is given back is unmapped, whatever the thread did last."""
    thread = Scatterer()
    image = Image()
    gone = weakref.ref(image)

    def pieces(image: Image) -> Iterator[None]:
        while image:
            yield

    job = ScatterJob(pieces(image))
    del image
    thread.start(job)
    job.cancel()
    while not job.is_over:
        pass
    gc.collect()
    assert gone() is None
    thread.close()


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 40)), min_size=1, max_size=5),
    st.integers(0, 100_000),
    st.integers(5, 12),
)
def test_a_fill_never_leaves_its_chunk_whatever_the_budget(
    shapes: list[tuple[int, int]], budget: int, chunk_64s: int
) -> None:
    zero = np.zeros(1, dtype=np.int64)
    stretches = [
        Stretches(
            StretchForm(size, 1, (Copies(size, zero, zero, None),)),
            RegionId("kv"),
            np.arange(count) * 1000,
            np.arange(count)[:, None] * 1000,
        )
        for size, count in shapes
    ]
    slicer = CoverSlicer(stretches)
    num_bytes = 0
    while not slicer.is_empty:
        fill = slicer.next_fill(budget, 64 * chunk_64s)
        assert (fill.offset + fill.length).max() <= 64 * chunk_64s
        placed = [p.offset + p.stretches.covered_bytes for p in fill.placed]
        assert max(placed) <= 64 * chunk_64s
        num_bytes += fill.num_bytes
    assert num_bytes == slicer.num_bytes
