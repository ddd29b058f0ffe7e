"""Covering reads into a GPU: chunks there, strided copies, and what the driver's failures mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxferd.errors import Code, DeviceError
from kvxferd.ids import RegionId
from kvxferd.memory.driver import StridedCopy
from kvxferd.mover.process.chunks import IDLE_S, ChunkState
from kvxferd.mover.process.covering import ChunkFill, PlacedStretches, scatter
from kvxferd.mover.process.device_scatter import CALLS_PER_STEP, strided_copies
from kvxferd.mover.transport.base import MemoryRange
from kvxferd.mover.transport.copy_probe import probe_strided_copies
from kvxferd.plan.copy_patterns import form_patterns
from kvxferd.plan.covering import Stretches
from kvxferd.plan.stretches import Copies, StretchForm
from kvxferd.wire.common import RegionAddress
from tests.support.fake_driver import FakeDriver
from tests.support.open_fds import num_open_fds
from tests.support.pull_engine_harness import (
    BLOCKS,
    HEAD,
    Bench,
    blocks_here,
    check_arrived,
    scattered,
    states,
)

CHUNK = 64 << 10
MAX_PITCH = (1 << 31) - 1


class CountingDriver(FakeDriver):
    """Counts strided copies, and fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.num_copies = 0
        self.order: list[str] = []
        self.refuses_after: int | None = None  # strided copies
        self.is_lost = False  # no event can be queried

    def copy_strided(self, copies: Sequence[StridedCopy], stream: Any) -> None:
        for one in copies:
            if self.refuses_after is not None and self.num_copies >= self.refuses_after:
                raise DeviceError("cannot copy: refused", Code.DEVICE_ERROR)
            self.num_copies += 1
            self.order.append("copy")
            super().copy_strided([one], stream)

    def flush_writes(self) -> None:
        self.order.append("flush")
        super().flush_writes()

    def is_done(self, event: Any) -> bool:
        if self.is_lost:
            raise DeviceError("cannot copy: the device was lost", Code.DEVICE_ERROR)
        return super().is_done(event)


@pytest.fixture
def driver() -> CountingDriver:
    return CountingDriver()


@pytest.fixture
def bench(driver: CountingDriver) -> Iterator[Bench]:
    bench = Bench(chunk_bytes=CHUNK, driver=driver)
    yield bench
    bench.close()


@pytest.mark.parametrize("ids", [scattered(100), range(3, 300)])
def test_bytes_arrive_through_chunks_of_the_gpu(bench: Bench, driver: CountingDriver, ids: range) -> None:
    outcome = bench.pull(ids)
    assert (outcome.delivered, outcome.started, outcome.finished) == (True, True, True)
    check_arrived(bench, ids)
    assert outcome.covered_bytes == outcome.bytes == len(ids) * 4 * 4 * 2 * HEAD
    assert 0 < driver.num_copies <= outcome.runs // 4
    assert set(states(bench)) == {ChunkState.FREE}


def test_neighbouring_blocks_share_a_copy(bench: Bench, driver: CountingDriver) -> None:
    bench.start(range(300))
    bench.run()
    assert driver.num_copies <= 2 * 4 * 2, "of two ranks and four tensors, which a chunk may cut"


def test_writes_of_a_network_card_are_flushed_before_each_copy(driver: CountingDriver) -> None:
    def flush() -> None:
        with driver.on(driver.devices()[0].uuid):
            driver.flush_writes()

    bench = Bench(chunk_bytes=CHUNK, driver=driver, flush=flush)
    assert bench.pull(scattered(8)).delivered
    assert driver.order[0] == "flush"
    assert driver.order.count("flush") >= len(bench.agents)
    bench.close()


def test_a_flush_that_fails_copies_nothing_and_loses_the_chunk(driver: CountingDriver) -> None:
    """Bytes that the network card has sent may reach the chunk later, and never the blocks."""

    def fail() -> None:
        raise DeviceError("cannot flush", Code.DEVICE_ERROR)

    bench = Bench(chunk_bytes=CHUNK, driver=driver, flush=fail)
    outcome = bench.pull(scattered(8))
    assert (outcome.delivered, outcome.code) == (False, Code.DEVICE_ERROR)
    assert not driver.num_copies
    assert states(bench)[ChunkState.LOST] >= 1
    assert not blocks_here(bench).any()
    bench.close()


def test_a_pull_is_over_when_its_copies_events_are_done(bench: Bench, driver: CountingDriver) -> None:
    driver.polls_per_copy = 10**9
    number = bench.start(scattered(8))
    bench.run()
    assert driver.num_copies
    assert bench.reported == []
    bench.engine.abort(number)
    bench.run()
    assert bench.reported == [], "copies that are started cannot be taken back"
    driver.polls_per_copy = 0
    bench.run()
    outcome = bench.outcomes()[number]
    assert (outcome.started, outcome.finished, outcome.code) == (True, True, Code.CANCELLED)
    assert set(states(bench)) == {ChunkState.FREE}


def test_a_cancelled_scatter_starts_no_further_copy(bench: Bench, driver: CountingDriver) -> None:
    ids = range(0, BLOCKS - 1, 3)
    total = bench.start(ids)
    while not driver.num_copies:
        bench.engine.step()
    assert driver.num_copies <= 2 * CALLS_PER_STEP
    bench.engine.abort(total)
    started = driver.num_copies
    bench.run()
    assert driver.num_copies == started
    assert bench.outcomes()[total].finished


def test_a_refused_copy_fails_the_pull_and_later_ones_read_directly(
    bench: Bench, driver: CountingDriver
) -> None:
    driver.refuses_after = 3
    outcome = bench.pull(scattered(8))
    assert (outcome.delivered, outcome.finished, outcome.code) == (False, True, Code.DEVICE_ERROR)
    assert set(states(bench)) == {ChunkState.FREE}, "the copies before it are done"
    outcome = bench.pull(scattered(8))
    assert (outcome.delivered, outcome.covered_bytes) == (True, 0)
    check_arrived(bench, scattered(8))


def test_copies_of_which_nothing_is_known_leave_the_blocks_in_doubt(
    bench: Bench, driver: CountingDriver
) -> None:
    driver.is_lost = True
    outcome = bench.pull(scattered(8))
    assert (outcome.delivered, outcome.finished, outcome.quiesced_follows) == (False, False, False)
    assert states(bench)[ChunkState.LOST] >= 1
    assert len(bench.reported) == 1, "no word that they are quiet"


def test_chunks_of_the_gpu_are_given_back(driver: CountingDriver) -> None:
    bench = Bench(chunk_bytes=CHUNK, driver=driver)
    before = num_open_fds()
    bench.start(scattered(8))
    bench.run()
    assert num_open_fds() > before, "the fake driver's memory"
    bench.now += IDLE_S
    bench.engine.release_idle_chunks()
    assert num_open_fds() == before
    bench.close()


# --- the copies themselves


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_strided_copies_write_what_the_hosts_scatter_writes(data: st.DataObject) -> None:
    """Every byte, and no other; of regular and of irregular blocks, and forms of several local blocks."""
    heads, tokens = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    width = data.draw(st.sampled_from([1, 5, 16]))
    layers, num_blocks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    all_heads = heads + data.draw(st.integers(0, 1))
    layer_bytes = num_blocks * tokens * all_heads * width + data.draw(st.integers(0, 3))
    image, local, block = [], [], []
    for layer in range(layers):
        for head in range(heads):
            for token in range(tokens * num_blocks):
                image.append(((layer * heads + head) * tokens * num_blocks + token) * width)
                inside = (token % tokens * all_heads + head) * width
                local.append(layer * layer_bytes + inside)
                block.append(token // tokens)
    columns = [np.array(one, dtype=np.int64) for one in (image, local, block)]
    size = len(image) * width
    form = StretchForm(
        size,
        num_blocks,
        (Copies(width, columns[0], columns[1], None if num_blocks == 1 else columns[2]),),
    )
    stride = layers * layer_bytes + data.draw(st.integers(0, 2)) * all_heads * width
    places = data.draw(st.permutations(range(8)))
    if data.draw(st.booleans()):
        places = sorted(places)
    number = data.draw(st.integers(1, 8 // num_blocks))
    origins = np.array(places[: number * num_blocks], dtype=np.int64).reshape(number, num_blocks) * stride
    stretches = Stretches(form, RegionId("kv"), np.arange(number, dtype=np.int64) * size, origins)
    offset = data.draw(st.integers(0, 70))
    chunk = np.random.default_rng(1).integers(0, 256, offset + number * size, dtype=np.uint8)
    placed = PlacedStretches(stretches, offset)
    by_host, by_copies = (np.zeros(8 * stride, dtype=np.uint8) for _ in range(2))
    empty = np.empty(0, dtype=np.int64)
    for _ in scatter(ChunkFill(empty, empty, empty, (placed,), 0), chunk, {RegionId("kv"): by_host}):
        pass

    max_pitch = data.draw(st.sampled_from([width * 3, MAX_PITCH]))
    patterns = form_patterns(form, max_pitch)
    assert patterns is not None
    region = RegionAddress(RegionId("kv"), 5000, len(by_copies))
    written = np.zeros(len(by_copies), dtype=int)
    for one in strided_copies(
        placed, patterns, MemoryRange(300, len(chunk)), {RegionId("kv"): region}, max_pitch
    ):
        if one.rows > 1:
            assert one.width <= min(one.to_pitch, one.source_pitch)
            assert max(one.to_pitch, one.source_pitch) <= max_pitch
        if one.planes > 1:
            assert one.rows <= min(one.to_plane_rows, one.source_plane_rows)
        for to, source, length in one.each_row():
            by_copies[to - 5000 : to - 5000 + length] = chunk[source - 300 : source - 300 + length]
            written[to - 5000 : to - 5000 + length] += 1
    assert (by_copies == by_host).all()
    assert written.sum() == stretches.num_bytes
    assert written.max() == 1


@pytest.mark.parametrize(
    ("region_bytes", "chunk_bytes"),
    [(63, 1000), (1000, 63)],
)
def test_a_copy_that_leaves_its_memory_is_refused(region_bytes: int, chunk_bytes: int) -> None:
    at = np.arange(4, dtype=np.int64) * 16
    form = StretchForm(64, 1, (Copies(16, at, at, None),))
    stretches = Stretches(form, RegionId("kv"), at[:1], np.zeros((1, 1), dtype=np.int64))
    patterns = form_patterns(form, MAX_PITCH)
    assert patterns is not None
    regions = {RegionId("kv"): RegionAddress(RegionId("kv"), 5000, region_bytes)}
    with pytest.raises(IndexError):
        list(
            strided_copies(
                PlacedStretches(stretches, 0), patterns, MemoryRange(0, chunk_bytes), regions, 1000
            )
        )


# --- the probe


class WrongDriver(FakeDriver):
    """Copies as if no row had more than its width between it and the next, or nothing at all."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self._copies = copies

    def copy_strided(self, copies: Sequence[StridedCopy], stream: Any) -> None:
        packed = [one._replace(to_pitch=one.width) for one in copies]
        super().copy_strided(packed if self._copies else [], stream)


def probe(driver: FakeDriver) -> str:
    uuid = driver.devices()[0].uuid
    return probe_strided_copies(driver, uuid)


def test_the_probe_finds_copies_right_and_leaves_nothing() -> None:
    before = num_open_fds()
    assert probe(FakeDriver()) == ""
    assert num_open_fds() == before


@pytest.mark.parametrize("copies", [True, False])
def test_the_probe_finds_copies_wrong(copies: bool) -> None:
    assert "bytes other than" in probe(WrongDriver(copies))


def test_the_probe_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvxferd.mover.transport import copy_probe

    driver = FakeDriver()
    driver.polls_per_copy = 10**9
    monkeypatch.setattr(copy_probe, "LIMIT_S", 0.0)
    assert "have not ended" in probe(driver)
    kept = list(driver._mapped.items())
    assert len(kept) == 2, "a copy may still write it"
    for address, (size, _) in kept:
        driver.unmap(address, size)


def test_the_probe_reports_what_the_driver_refuses() -> None:
    driver = CountingDriver()
    driver.refuses_after = 1
    assert probe(driver) == "cannot copy: refused"
