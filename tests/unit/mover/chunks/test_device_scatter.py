"""Covering reads into a GPU: chunks there, copies of rows, and what the driver's failures mean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxferd.errors import Code, DeviceError
from kvxferd.ids import RegionId
from kvxferd.memory.driver import PAIRS_PER_LAUNCH, Rows
from kvxferd.mover.chunks.chunk_pool import IDLE_S, ChunkState
from kvxferd.mover.chunks.covering import ChunkFill, PlacedStretches, scatter_pieces
from kvxferd.mover.chunks.device_scatter import LAUNCHES_PER_STEP, row_copies
from kvxferd.mover.transport import copy_probe
from kvxferd.mover.transport.base import MemoryRange
from kvxferd.mover.transport.copy_probe import probe_copy_rows
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


class CountingDriver(FakeDriver):
    """Counts calls that copy rows, and fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.order: list[str] = []
        self.refuses_after: int | None = None  # calls
        self.is_lost = False  # no event can be queried

    def copy_rows(self, to: memoryview, source: memoryview, rows: Rows, stream: Any) -> None:
        if self.refuses_after is not None and self.num_calls >= self.refuses_after:
            raise DeviceError("cannot copy: refused", Code.DEVICE_ERROR)
        self.num_calls += 1
        self.order.append("copy")
        super().copy_rows(to, source, rows, stream)

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
    assert 0 < driver.num_calls <= 2 * 4 * 2, "of two ranks and four tensors, which a chunk may cut"
    assert set(states(bench)) == {ChunkState.FREE}


@pytest.mark.parametrize(
    ("lengths", "is_scattered"),
    [([32], False), ([16, 16], True), ([16, 32], False), ([16, 16, 16, 32], True)],
)
def test_what_has_few_copies_of_a_length_is_not_scattered(
    bench: Bench, lengths: list[int], is_scattered: bool
) -> None:
    zeros = {length: np.zeros(lengths.count(length), dtype=np.int64) for length in lengths}
    form = StretchForm(sum(lengths), 1, tuple(Copies(length, at, at, None) for length, at in zeros.items()))
    assert bench.device is not None
    assert bench.device.can_scatter(form) == is_scattered


@pytest.mark.parametrize("fails", [False, True])
def test_writes_of_a_network_card_are_flushed_before_each_copy(driver: CountingDriver, fails: bool) -> None:
    """Where that fails, bytes that are sent may reach the chunk later, and never the blocks."""

    def flush() -> None:
        if fails:
            raise DeviceError("cannot flush", Code.DEVICE_ERROR)
        with driver.on(driver.devices()[0].uuid):
            driver.flush_writes()

    bench = Bench(chunk_bytes=CHUNK, driver=driver, flush=flush)
    outcome = bench.pull(scattered(8))
    assert (outcome.delivered, outcome.code) == (not fails, Code.DEVICE_ERROR if fails else None)
    if fails:
        assert not driver.num_calls
        assert states(bench)[ChunkState.LOST] >= 1
        assert not blocks_here(bench).any()
    else:
        assert driver.order[0] == "flush"
        assert driver.order.count("flush") >= len(bench.agents)
    bench.close()


def test_a_pull_is_over_when_its_copies_events_are_done(bench: Bench, driver: CountingDriver) -> None:
    driver.polls_per_copy = 10**9
    number = bench.start(scattered(8))
    bench.run()
    assert driver.num_calls
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
    while not driver.num_calls:
        bench.engine.step()
    assert driver.num_calls <= 2 * LAUNCHES_PER_STEP
    bench.engine.abort(total)
    started = driver.num_calls
    bench.run()
    assert driver.num_calls == started
    assert bench.outcomes()[total].finished


def test_a_refused_copy_fails_the_pull_and_later_ones_read_directly(
    bench: Bench, driver: CountingDriver
) -> None:
    driver.refuses_after = 1
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
    bench.chunks.release_idle(bench.now)
    assert num_open_fds() == before
    bench.close()


# --- the copies themselves


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_copies_of_rows_write_what_the_hosts_scatter_writes(data: st.DataObject) -> None:
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
    offset, step = data.draw(st.integers(0, 70)), size + data.draw(st.integers(0, 3))
    chunk = np.random.default_rng(1).integers(0, 256, offset + number * step, dtype=np.uint8)
    placed = PlacedStretches(stretches, offset + np.arange(number, dtype=np.int64) * step)
    by_host, by_copies = (np.zeros(8 * stride, dtype=np.uint8) for _ in range(2))
    empty = np.empty(0, dtype=np.int64)
    for piece in scatter_pieces(
        ChunkFill(empty, empty, empty, (placed,), 0), chunk, {RegionId("kv"): by_host}
    ):
        piece()

    region = RegionAddress(RegionId("kv"), 5000, len(by_copies))
    written = np.zeros(len(by_copies), dtype=int)
    span, regions = MemoryRange(300, len(chunk)), {RegionId("kv"): region}
    for targets, sources, rows in row_copies(placed, form_patterns(form), span, regions):
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            for row in range(rows.rows):
                to, at = target - 5000 + row * rows.to_pitch, source - 300 + row * rows.source_pitch
                by_copies[to : to + rows.width] = chunk[at : at + rows.width]
                written[to : to + rows.width] += 1
    assert (by_copies == by_host).all()
    assert written.sum() == stretches.num_bytes
    assert written.max() == 1


@pytest.mark.parametrize(("num_places", "num_launches"), [(300, 4), (5000, 20 + 20 + 10)])
def test_each_has_the_addresses_of_one_launch(num_places: int, num_launches: int) -> None:
    """Of all stretches that there is room for, or of a part of one stretch's."""
    places = np.random.default_rng(1).permutation(num_places).astype(np.int64) * 8
    form = StretchForm(num_places * 8, 1, (Copies(8, np.sort(places), places, None),))
    number = 20
    origins = np.arange(number, dtype=np.int64)[:, None] * form.size_bytes
    stretches = Stretches(form, RegionId("kv"), origins[:, 0], origins)
    region = RegionAddress(RegionId("kv"), 0, number * form.size_bytes)
    calls = list(
        row_copies(
            PlacedStretches(stretches, origins[:, 0]),
            form_patterns(form),
            MemoryRange(0, region.size_bytes),
            {RegionId("kv"): region},
        )
    )
    sizes = [len(one.to) for one in calls]
    assert sum(sizes) == number * num_places
    assert max(sizes) <= PAIRS_PER_LAUNCH
    assert len(sizes) == num_launches


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize(
    ("origin", "region_bytes", "chunk_bytes", "is_right"),
    [
        (0, 64, 64, True),
        (0, 63, 1000, False),
        (0, 1000, 63, False),
        (-1, 1000, 1000, False),
        (936, 1000, 64, True),
        (937, 1000, 64, False),
    ],
)
def test_a_copy_that_leaves_its_memory_is_refused(
    origin: int, region_bytes: int, chunk_bytes: int, is_right: bool, is_backward: bool
) -> None:
    at = np.arange(4, dtype=np.int64) * 16
    form = StretchForm(64, 1, (Copies(16, at, at[::-1] if is_backward else at, None),))
    stretches = Stretches(form, RegionId("kv"), at[:1], np.full((1, 1), origin, dtype=np.int64))
    regions = {RegionId("kv"): RegionAddress(RegionId("kv"), 5000, region_bytes)}
    placed, chunk = PlacedStretches(stretches, at[:1]), MemoryRange(300, chunk_bytes)
    with nullcontext() if is_right else pytest.raises(IndexError, match="leaves the chunk, or region kv"):
        assert list(row_copies(placed, form_patterns(form), chunk, regions))


# --- the probe


class WrongDriver(FakeDriver):
    """Copies no row but the first, or other rows' bytes too."""

    def __init__(self, copies_too_much: bool) -> None:
        super().__init__()
        self._copies_too_much = copies_too_much

    def copy_rows(self, to: memoryview, source: memoryview, rows: Rows, stream: Any) -> None:
        wrong = rows._replace(width=rows.width + 1) if self._copies_too_much else rows._replace(rows=1)
        super().copy_rows(to, source, wrong, stream)


def refusing() -> CountingDriver:
    driver = CountingDriver()
    driver.refuses_after = 1
    return driver


@pytest.mark.parametrize(
    ("driver", "why"),
    [
        (FakeDriver(), ""),
        (WrongDriver(copies_too_much=True), "bytes other than"),
        (WrongDriver(copies_too_much=False), "bytes other than"),
        (refusing(), "cannot copy: refused"),
    ],
)
def test_the_probe_finds_what_is_wrong_and_leaves_nothing(driver: FakeDriver, why: str) -> None:
    before = num_open_fds()
    found = probe_copy_rows(driver, driver.devices()[0].uuid)
    assert why in found
    assert bool(found) == bool(why)
    assert num_open_fds() == before


def test_the_probe_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    driver.polls_per_copy = 10**9
    monkeypatch.setattr(copy_probe, "LIMIT_S", 0.0)
    assert "have not ended" in probe_copy_rows(driver, driver.devices()[0].uuid)
    kept = list(driver._mapped.items())
    assert len(kept) == 2, "a copy may still write it"
    for address, (size, _) in kept:
        driver.unmap(address, size)
