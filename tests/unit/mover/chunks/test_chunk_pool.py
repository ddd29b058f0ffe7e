"""Chunks that cannot be made, given back, or read to the end: what they cost the pulls and the node."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxferd.ids import RegionId
from kvxferd.mover.chunks.chunk_pool import IDLE_S, RETRY_S, SLOW_S, ChunkState
from kvxferd.mover.chunks.covering import CoverSlicer
from kvxferd.mover.transport.base import MemoryRange, TransportError
from kvxferd.plan.covering import Stretches
from kvxferd.plan.stretches import Copies, StretchForm
from kvxferd.wire.mover import ChunkMemoryRequest
from tests.support.pull_engine_harness import Bench, check_arrived, scattered

CHUNK = 64 << 10


class Refusing:
    """Stands for a transport's `register` or `deregister`."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, span: MemoryRange) -> None:
        self.num_calls += 1
        raise TransportError("no memory may be locked", settled=True)


def test_a_chunk_that_cannot_be_made_is_not_tried_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pull reads directly, at once. A later one tries again."""
    bench = Bench(chunk_bytes=CHUNK)
    refusing = Refusing()
    with monkeypatch.context() as patch:
        patch.setattr(bench.fabric.agents[bench.reader], "register", refusing)
        outcome = bench.pull(scattered(8))
    assert refusing.num_calls == 1
    assert (outcome.delivered, outcome.covered_bytes) == (True, 0)
    bench.now += RETRY_S
    outcome = bench.pull(scattered(8))
    assert outcome.covered_bytes == outcome.bytes


def test_a_chunk_that_the_library_does_not_let_go_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is counted and reported once, however often the mover is to give memory back."""
    bench = Bench(chunk_bytes=CHUNK)
    bench.fabric.polls_per_read = 2
    bench.pull(scattered(8))
    refusing = Refusing()
    reports: list[ChunkMemoryRequest] = []
    monkeypatch.setattr(bench.chunks, "_report", reports.append)
    monkeypatch.setattr(bench.fabric.agents[bench.reader], "deregister", refusing)
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


@pytest.mark.parametrize(
    ("num_lost", "num_chunks", "num_covered"),
    [(1, 4, 2), (3, 4, 1), (1, 1, 0)],  # of two sources
)
def test_later_pulls_do_not_wait_because_a_chunk_is_lost(
    num_lost: int, num_chunks: int, num_covered: int
) -> None:
    bench = Bench(chunk_bytes=CHUNK, max_chunks=num_chunks)
    bench.fabric.polls_per_read = 2
    for _ in range(num_lost):
        bench.start(scattered(8))
        bench.engine.step()
        bench.fabric.errors[bench.agents[num_chunks == 4]] = TransportError("odd", settled=False)
        bench.run()
    assert bench.chunks.count(ChunkState.LOST) == num_lost
    bench.now += 2 * SLOW_S
    outcome = bench.pull(scattered(8))
    assert outcome.delivered
    assert outcome.covered_bytes == outcome.bytes // 2 * num_covered
    check_arrived(bench, scattered(8))


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
    slicer = CoverSlicer(stretches, [])
    num_bytes = 0
    while not slicer.is_empty:
        fill = slicer.next_fill(budget, 64 * chunk_64s)
        assert (fill.offset + fill.length).max() <= 64 * chunk_64s
        placed = [p.offsets.max() + p.stretches.form.size_bytes for p in fill.placed]
        assert max(placed) <= 64 * chunk_64s
        num_bytes += fill.num_bytes
    assert num_bytes == slicer.num_bytes


def test_stretches_that_follow_one_another_are_one_read_whatever_their_forms_unless_a_region_begins() -> None:
    zero, eights = np.zeros(1, dtype=np.int64), np.arange(8, dtype=np.int64)
    stretches = [
        Stretches(
            StretchForm(size, 1, (Copies(size, zero, zero, None),)),
            RegionId("kv"),
            1000 + first + eights * 48,
            first + eights[:, None] * 48,
        )
        for size, first in ((16, 0), (32, 16))
    ]
    fill = CoverSlicer(stretches, []).next_fill(1 << 20, 1 << 20)
    assert (fill.remote.tolist(), fill.length.tolist()) == ([1000], [8 * 48])
    images = [one.offsets.tolist() for one in fill.placed]
    assert images == [(first + eights * 48).tolist() for first in (0, 16)]
    fill = CoverSlicer(stretches, [500, 1048]).next_fill(1 << 20, 1 << 20)
    assert (fill.remote.tolist(), fill.length.tolist()) == ([1000, 1048], [48, 7 * 48])
