"""What reads cost, measured when an agent is connected: what is read, when, and what is made of it."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

import pytest

from kvxferd.ids import AgentName
from kvxferd.mover.process.link_measurement import (
    MEASUREMENT_TIMEOUT_S,
    NUM_DESCRIPTORS,
    NUM_ROUNDS,
    PAGE_BYTES,
    LinkMeasurement,
    measure_copy,
    page_rest,
)
from kvxferd.mover.process.remote_agents import RemoteAgents
from kvxferd.mover.transport.base import HOST, ReadHandle, ReadKinds, Span, TransportError
from kvxferd.plan import Runs
from kvxferd.plan.read_costs import CostModel, LinkCosts, ReadShape
from kvxferd.wire.mover import LoadRemote
from tests.support.memory_transport import Fabric, MemoryTransport
from tests.support.pull_engine_harness import Bench, scattered

THERE = AgentName("there")
NUM_READS = 2 * NUM_ROUNDS


class TimedTransport(MemoryTransport):
    """A transport whose reads take as long as the test's arithmetic says."""

    def __init__(self, fabric: Fabric, agent: AgentName, advance: Callable[[Runs], None]) -> None:
        super().__init__(fabric, agent)
        self._advance_clock = advance
        self.reads: list[Runs] = []

    def post(self, agent: AgentName, runs: Runs, kinds: ReadKinds = HOST) -> ReadHandle:
        handle = super().post(agent, runs, kinds)
        self.reads.append(runs)
        self._advance_clock(runs)
        return handle


class Rig:
    """A reader, and an agent with two pages to be read."""

    def __init__(
        self, descriptor_s: float = 5e-6, bytes_per_s: float = 1e9, size: int = 2 * PAGE_BYTES
    ) -> None:
        self.descriptor_s = descriptor_s
        self.bytes_per_s = bytes_per_s
        self.now = 1.0
        self.fabric = Fabric()
        self.page = mmap.mmap(-1, 2 * PAGE_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.page))
        there = MemoryTransport(self.fabric, THERE)
        there.register(Span(self.address, size))
        self.here = TimedTransport(self.fabric, AgentName("here"), self.advance)
        self.remotes = RemoteAgents(self.here)
        self.remotes.load(THERE, there.metadata([Span(self.address, size)]))
        self.costs = CostModel()
        self.measurement = LinkMeasurement(self.here, self.remotes, self.costs, lambda: self.now)

    def advance(self, runs: Runs) -> None:
        self.now += len(runs.length) * self.descriptor_s + int(runs.length.sum()) / self.bytes_per_s

    def run(self, is_idle: bool = True) -> None:
        for _ in range(20):
            self.measurement.step(is_idle)

    @property
    def link(self) -> LinkCosts:
        return self.costs.link(THERE)


@pytest.mark.parametrize("descriptor_s", [0.3e-6, 2e-6, 7e-6])
@pytest.mark.parametrize("bytes_per_s", [0.2e9, 0.5e9])
def test_both_constants_are_measured_where_bytes_take_long(descriptor_s: float, bytes_per_s: float) -> None:
    rig = Rig(descriptor_s, bytes_per_s)
    rig.measurement.queue(THERE, rig.address)
    rig.run()
    assert not rig.measurement.is_busy
    # A word's 16 bytes count as the descriptor's.
    assert rig.link.descriptor_s == pytest.approx(descriptor_s + 16 / bytes_per_s)
    assert rig.link.bytes_per_s == pytest.approx(bytes_per_s)


def test_a_bandwidth_that_a_page_does_not_show_is_left_to_the_slices() -> None:
    """At 40 GB/s a page takes 0.1 us, beside 2 of the descriptor."""
    rig = Rig(2e-6, 40e9)
    rig.measurement.queue(THERE, rig.address)
    rig.run()
    assert rig.link.descriptor_s == pytest.approx(2e-6, rel=0.01)
    assert rig.link.bytes_per_s == LinkCosts().bytes_per_s


def test_one_page_is_read_and_no_byte_behind_it() -> None:
    rig = Rig()
    offset = 48
    rig.measurement.queue(THERE, rig.address + offset)
    rig.run()
    assert len(rig.here.reads) == NUM_READS
    for runs in rig.here.reads:
        assert len(runs.length) == NUM_DESCRIPTORS
        assert int(runs.remote.min()) == rig.address + offset
        assert int((runs.remote + runs.length).max()) <= rig.address + PAGE_BYTES
    assert page_rest(rig.address + offset) == PAGE_BYTES - offset


def test_nothing_is_read_while_there_is_something_to_do() -> None:
    rig = Rig()
    rig.measurement.queue(THERE, rig.address)
    rig.run(is_idle=False)
    assert rig.fabric.posts == []
    assert rig.measurement.is_busy
    assert not rig.measurement.is_reading


def test_slices_are_the_better_measurement() -> None:
    rig = Rig()
    rig.link.learn(ReadShape(2000, 512_000), 0.0, 0.005)
    before = rig.link.predict_s(ReadShape(1, 1))
    rig.measurement.queue(THERE, rig.address)
    rig.run()
    assert rig.fabric.posts == []
    assert rig.link.predict_s(ReadShape(1, 1)) == before


def test_slices_that_are_read_between_two_reads_stay() -> None:
    rig = Rig()
    rig.measurement.queue(THERE, rig.address)
    for _ in range(3):
        rig.measurement.step(is_idle=True)
    rig.link.learn(ReadShape(2000, 512_000), rig.now, rig.now + 0.005)
    learnt = rig.link.descriptor_s
    rig.run()
    assert not rig.measurement.is_busy
    assert rig.link.descriptor_s == learnt


def test_memory_that_ends_within_the_page_is_not_measured() -> None:
    rig = Rig(size=64)
    rig.measurement.queue(THERE, rig.address)
    rig.run()
    assert not rig.measurement.is_busy
    assert rig.link == LinkCosts()


def test_one_that_hangs_is_given_up_and_the_next_is_measured() -> None:
    rig = Rig()
    other = AgentName("other")
    there = MemoryTransport(rig.fabric, other)
    there.register(Span(rig.address, PAGE_BYTES))
    rig.remotes.load(other, there.metadata([Span(rig.address, PAGE_BYTES)]))
    rig.fabric.stalled.add(THERE)
    rig.measurement.queue(THERE, rig.address)
    rig.measurement.queue(other, rig.address)
    rig.run()
    assert rig.measurement.is_reading
    assert rig.costs.link(other) == LinkCosts()
    rig.now += MEASUREMENT_TIMEOUT_S
    rig.run()
    assert not rig.measurement.is_busy
    assert rig.costs.link(other) != LinkCosts()
    assert rig.link == LinkCosts()
    rig.fabric.stalled.clear()
    rig.run()
    assert rig.link == LinkCosts()  # its time counts no more
    rig.remotes.drop(THERE)
    assert THERE not in rig.here.loaded  # nothing is in flight from it


def test_one_that_fails_is_left_to_the_pull() -> None:
    rig = Rig()
    rig.fabric.stalled.add(THERE)
    rig.measurement.queue(THERE, rig.address)
    rig.run()
    rig.fabric.stalled.clear()
    rig.fabric.errors[THERE] = TransportError("gone", settled=True, lost=True)
    rig.run()
    assert not rig.measurement.is_busy
    assert rig.remotes.ensure_loaded(THERE) == ""


def test_one_that_is_dropped_meanwhile_is_forgotten() -> None:
    rig = Rig()
    rig.measurement.queue(THERE, rig.address)
    rig.measurement.step(is_idle=True)
    rig.measurement.forget(THERE)
    assert not rig.measurement.is_busy
    rig.run()
    assert rig.link == LinkCosts()


def test_the_copies_speed_is_measured_once() -> None:
    assert 1e7 < measure_copy() < 1e12
    model = CostModel()
    model.start_copy(1e9)
    assert model.copy_bytes_per_s == 1e9
    model.learn_copy(4 << 20, (4 << 20) / 1e9)
    model.start_copy(5e9)
    assert model.copy_bytes_per_s == pytest.approx(1e9)


@pytest.mark.parametrize("always_covers", [False, True])
def test_the_engine_measures_where_it_chooses(always_covers: bool) -> None:
    """Where a way is forced nothing is predicted, and nothing measured."""
    bench = Bench(chunk_bytes=64 << 10, always_covers=always_covers)
    word = bench.remote[0].span.address
    message = LoadRemote(agent=bench.agents[0], metadata=bench.transports[0].metadata([bench.remote[0].span]))
    bench.engine.add_remote(message.agent, message.metadata, word)
    bench.run()
    assert not bench.engine.is_busy
    of_measurement = [posts for _, posts in bench.fabric.posts if posts == NUM_DESCRIPTORS]
    assert len(of_measurement) == (0 if always_covers else NUM_READS)
    number = bench.start(scattered(40))
    bench.run()
    assert bench.outcomes()[number].delivered


@pytest.mark.parametrize(("num_blocks", "is_chosen"), [(8, False), (9, True)])
def test_short_pulls_between_equal_layouts_are_not_chosen_for_again(num_blocks: int, is_chosen: bool) -> None:
    bench = Bench(chunk_bytes=64 << 10, always_covers=False, layout_here="HND")
    for count in (40, num_blocks):
        number = bench.start(scattered(count))
        bench.run()
    outcome = bench.outcomes()[number]
    assert outcome.delivered
    assert (outcome.predicted_s > 0) == is_chosen


def test_short_pulls_between_layouts_that_differ_are_chosen_for() -> None:
    bench = Bench(chunk_bytes=64 << 10, always_covers=False)
    for count in (40, 1):
        number = bench.start(scattered(count))
        bench.run()
    assert bench.outcomes()[number].predicted_s > 0
