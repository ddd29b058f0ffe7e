"""Covering reads in the pull engine: what they mean for a pull, for its blocks and for the chunks."""

from __future__ import annotations

import msgspec
import pytest

from kvxferd.errors import Code
from kvxferd.ids import PullId
from kvxferd.mover.chunks.chunk_pool import IDLE_S, STUCK_S, ChunkState
from kvxferd.mover.chunks.scatterer import ScatterJob
from kvxferd.mover.reads import covering_reads
from kvxferd.mover.transport.base import TransportError
from kvxferd.mover.transport.staging_source import CHUNK_REPLY_TIMEOUT_S
from kvxferd.plan.read_costs import START_BYTES_PER_S, START_DESCRIPTOR_S
from kvxferd.wire.common import RegionAddress
from kvxferd.wire.mover import ChunkMemoryRequest
from tests.support.pull_engine_harness import (
    HEAD,
    Bench,
    ManualScatterer,
    blocks_here,
    check_arrived,
    scattered,
    states,
)

CHUNK = 64 << 10


@pytest.fixture
def by_hand() -> ManualScatterer:
    return ManualScatterer()


@pytest.fixture
def bench() -> Bench:
    return Bench(chunk_bytes=CHUNK)


@pytest.mark.parametrize("chunk_bytes", [1 << 10, CHUNK, 4 << 20])
@pytest.mark.parametrize("polls", [0, 3])
@pytest.mark.parametrize("max_runs", [3, 1 << 20])
def test_bytes_arrive_through_chunks(chunk_bytes: int, polls: int, max_runs: int) -> None:
    bench = Bench(max_runs=max_runs, chunk_bytes=chunk_bytes)
    bench.fabric.polls_per_read = polls
    outcome = bench.pull(scattered(100))
    assert (outcome.delivered, outcome.started, outcome.finished) == (True, True, True)
    check_arrived(bench, scattered(100))
    assert outcome.bytes == 100 * 4 * 4 * 2 * HEAD
    assert set(states(bench)) == {ChunkState.FREE}


def test_the_word_is_read_while_a_chunk_is_scattered(by_hand: ManualScatterer) -> None:
    bench = Bench(chunk_bytes=4 << 20, scatterer=by_hand)
    number = bench.start(scattered(8))
    bench.run()
    assert bench.fabric.posts[-1] == (bench.agents[0], 1), "the fence word"
    assert bench.reported == []
    by_hand.run_all()
    bench.run()
    assert bench.outcomes()[number].delivered
    check_arrived(bench, scattered(8))


def test_an_abort_waits_for_no_read_into_a_chunk(bench: Bench) -> None:
    """Nothing that the network does can reach the blocks. The chunk waits for the read."""
    bench.fabric.stalled |= set(bench.agents)
    number = bench.start(scattered(8))
    bench.run()
    bench.engine.abort(number)
    bench.run()
    outcome = bench.outcomes()[number]
    assert (outcome.started, outcome.finished, outcome.code) == (False, True, Code.CANCELLED)
    assert states(bench) == {ChunkState.DRAINING: 2}
    assert bench.engine.is_busy
    bench.fabric.stalled.clear()
    bench.run()
    assert states(bench) == {ChunkState.FREE: 2}
    assert not blocks_here(bench).any()
    assert not bench.engine.is_busy


def test_an_abort_waits_for_a_scatter_that_runs(by_hand: ManualScatterer) -> None:
    bench = Bench(chunk_bytes=4 << 20, scatterer=by_hand)
    number = bench.start(scattered(8))
    bench.run()
    for job in by_hand.jobs:
        job.run_piece()
    bench.engine.abort(number)
    bench.run()
    assert bench.reported == [], "a copy may run"
    by_hand.run_all()
    before = bench.local.array.copy()
    bench.run()
    outcome = bench.outcomes()[number]
    assert (outcome.started, outcome.finished, outcome.code) == (True, True, Code.CANCELLED)
    assert (bench.local.array == before).all()
    assert set(states(bench)) == {ChunkState.FREE}


@pytest.mark.parametrize(
    ("error", "num_lost"),
    [
        (TransportError("odd", settled=False), 1),
        (TransportError("gone", settled=False, lost=True), 1),
        (TransportError("gone", settled=True, lost=True), 0),
    ],
)
def test_a_failure_costs_the_chunk_unless_it_proves_the_end_and_never_the_blocks(
    error: TransportError, num_lost: int
) -> None:
    bench = Granting()
    bench.fabric.polls_per_read = 2
    number = bench.start_granted(4)
    bench.fabric.errors[bench.agents[1]] = error
    bench.run()
    outcome = bench.outcomes()[number]
    assert (outcome.delivered, outcome.finished, outcome.code) == (False, True, Code.TRANSPORT)
    assert bench.chunks.count(ChunkState.LOST) == bench.reports[-1].num_lost == num_lost
    assert bench.pull(scattered(8)).delivered, "a retry needs not wait for a read into a lost chunk"
    assert bench.chunks.count(ChunkState.LOST) == num_lost
    check_arrived(bench, scattered(8))


def test_no_copy_starts_for_a_pull_that_failed_in_the_same_poll(by_hand: ManualScatterer) -> None:
    bench = Bench(chunk_bytes=16 << 10, scatterer=by_hand)
    bench.fabric.polls_per_read = 4
    number = bench.start(range(8))
    bench.engine.step()
    bench.engine.step()
    pull = bench.engine._by_id[number]
    first, second = pull.reads
    second.handle.polls_left = 0
    bench.fabric.errors[first.agent] = TransportError("gone", settled=True)
    bench.engine.step()
    bench.drain()
    assert not by_hand.jobs
    assert (bench.outcomes()[number].started, bench.outcomes()[number].finished) == (False, True)


def test_an_agent_stays_loaded_while_a_read_of_an_ended_pull_drains(bench: Bench) -> None:
    bench.fabric.stalled.add(bench.agents[1])
    number = bench.start(scattered(8))
    bench.run()
    bench.engine.abort(number)
    bench.run()
    bench.engine.drop_remote(bench.agents[1])
    reader = bench.fabric.agents[bench.reader]
    assert bench.agents[1] in reader.loaded
    bench.fabric.stalled.clear()
    bench.run()
    assert bench.agents[1] not in reader.loaded


@pytest.mark.parametrize(
    ("max_chunks", "since_s"),
    [
        pytest.param(1, 0.0, id="memory is short"),
        pytest.param(2, STUCK_S, id="a read of its source is stuck"),  # and may never end
    ],
)
def test_a_pull_that_gets_no_chunk_reads_directly_after_a_while(max_chunks: int, since_s: float) -> None:
    bench = Bench(chunk_bytes=CHUNK, max_chunks=max_chunks)
    bench.fabric.stalled.add(bench.agents[0])
    bench.start(range(1))
    bench.engine.step()
    number = bench.start(scattered(8))
    bench.run()
    bench.now += since_s
    bench.run()
    bench.now += covering_reads.CHUNK_WAIT_S
    bench.run()
    assert (bench.agents[1 if since_s == 0.0 else 0], 8 * 4 * 4) in bench.fabric.posts, "run by run"
    bench.fabric.stalled.clear()
    bench.run()
    outcome = bench.outcomes()[number]
    assert outcome.delivered
    assert outcome.covered_bytes < outcome.bytes == 8 * 4 * 4 * 2 * HEAD, (
        "those of a changed way are not counted"
    )
    check_arrived(bench, scattered(8))


def test_a_stopped_source_is_waited_for_and_holds_one_chunk_and_those_that_it_had() -> None:
    """Direct reads of what is not posted yet would leave the blocks in doubt, and come no sooner."""
    bench = Bench(chunk_bytes=1 << 10, max_chunks=4)
    bench.fabric.stalled.add(bench.agents[0])
    numbers = [bench.start(scattered(100)) for _ in range(2)]
    bench.run()
    held = [chunk for chunk in bench.chunks._chunks if chunk.agent == bench.agents[0]]
    assert len(held) < 4
    for _ in range(4):
        bench.now += STUCK_S / 5
        numbers.append(bench.start(scattered(100)))
        bench.run()
    assert [chunk for chunk in bench.chunks._chunks if chunk.agent == bench.agents[0]] == held
    for number in numbers:
        bench.engine.abort(number)
    bench.run()
    outcomes = bench.outcomes()
    assert {(outcomes[number].code, outcomes[number].finished) for number in numbers} == {
        (Code.CANCELLED, True)
    }
    bench.fabric.stalled.clear()
    bench.run()
    assert set(states(bench)) == {ChunkState.FREE}


def test_a_copy_that_would_leave_the_region_fails_the_pull(by_hand: ManualScatterer) -> None:
    bench = Bench(chunk_bytes=4 << 20, scatterer=by_hand)
    number = bench.start(scattered(8))
    bench.run()

    def broken() -> object:
        raise IndexError("index 7 is out of bounds")
        yield

    by_hand.jobs[0]._pieces = broken()  # type: ignore[assignment]
    by_hand.run_all()
    bench.run()
    outcome = bench.outcomes()[number]
    assert (outcome.delivered, outcome.finished, outcome.code) == (False, True, Code.INTERNAL)


def test_the_engine_copies_only_where_no_read_is_in_flight(by_hand: ManualScatterer) -> None:
    """A read is polled: over TCP the bytes come no sooner than that."""
    helped = []
    by_hand.help = lambda: bool(by_hand.jobs) and not helped.append(by_hand.copy_once())  # type: ignore[method-assign,func-returns-value]
    bench = Bench(chunk_bytes=CHUNK, scatterer=by_hand)
    assert bench.pull(scattered(8)).delivered
    assert helped
    bench.fabric.stalled |= set(bench.agents)
    bench.start(scattered(8))
    bench.run()
    helped.clear()
    by_hand.start(ScatterJob(iter([None])))
    bench.run()
    assert not helped


def test_each_pull_is_read_in_the_way_that_is_predicted_to_take_less() -> None:
    """100 blocks are 3,200 runs of 16 bytes, one block is 32."""
    bench = Bench(chunk_bytes=CHUNK, always_covers=False)
    bench.start(range(1))
    bench.run()
    assert set(states(bench)) == set(), "read directly"
    assert bench.pull(scattered(100)).delivered
    assert set(states(bench)) == {ChunkState.FREE}
    check_arrived(bench, scattered(100))


class HalfStaged(Bench):
    """A reader of two ranks, of which the first is staged."""

    def regions_of(self, number: int) -> tuple[RegionAddress, ...]:
        return tuple(msgspec.structs.replace(r, staged=number == 0) for r in super().regions_of(number))


def test_no_covering_read_from_a_staged_source_is_predicted() -> None:
    """Its pulls would teach how long covering reads take."""
    bench = HalfStaged(chunk_bytes=CHUNK, always_covers=False)
    number = bench.start(scattered(200))
    bench.run()
    bench.now += CHUNK_REPLY_TIMEOUT_S + 1.0  # nobody serves the staged one here
    bench.run()
    outcome = bench.outcomes()[number]
    assert outcome.covered_bytes == outcome.bytes // 2
    # 200 blocks of 4 tensors, 4 tokens and a head are 3,200 runs.
    assert outcome.predicted_s > 3200 * START_DESCRIPTOR_S + outcome.bytes / 2 / START_BYTES_PER_S


class Granting(Bench):
    """A reader whose daemon answers when the test says so."""

    def __init__(self) -> None:
        super().__init__(chunk_bytes=CHUNK, max_chunks=0)
        self.reports: list[ChunkMemoryRequest] = []
        self.chunks._report = self.reports.append

    def start_granted(self, num_chunks: int) -> PullId:
        """Start a pull that asks for memory, and grant so much."""
        number = self.start(scattered(8))
        self.engine.step()
        self.chunks.set_grant(num_chunks, self.now)
        return number


@pytest.mark.parametrize("grant", [2, 0, None])
def test_a_pull_waits_for_the_grant_of_memory_and_not_for_long(grant: int | None) -> None:
    """It reads directly where there is none, at once, and where the daemon is silent."""
    bench = Granting()
    number = bench.start(scattered(8))
    bench.run()
    assert bench.fabric.posts == []
    assert [(one.num_wanted, one.num_held) for one in bench.reports] == [(4, 0)]
    if grant is None:
        bench.now += covering_reads.CHUNK_WAIT_S
    else:
        bench.chunks.set_grant(grant, bench.now)
    bench.run()
    assert bench.outcomes()[number].delivered
    check_arrived(bench, scattered(8))
    assert bench.chunks.num_bytes <= (grant or 0) * CHUNK
    if grant is not None:
        assert bench.pull(scattered(8)).delivered
        assert len(bench.reports) == (2 if grant else 1), "it is not asked for each pull"


def test_chunks_over_a_lower_grant_are_given_back_when_they_are_free() -> None:
    bench = Granting()
    bench.fabric.stalled |= set(bench.agents)
    number = bench.start_granted(4)
    bench.run()
    held = bench.chunks.num_bytes
    assert held >= 2 * CHUNK
    bench.chunks.set_grant(1, bench.now)
    assert bench.chunks.num_bytes == bench.reports[-1].num_held * CHUNK == held, "they are being read"
    bench.fabric.stalled.clear()
    bench.run()
    assert bench.outcomes()[number].delivered
    assert bench.chunks.num_bytes == CHUNK
    assert bench.reports[-1].num_held == 1


def test_an_idle_mover_wants_nothing_and_asks_again_when_it_reads() -> None:
    bench = Granting()
    bench.start_granted(4)
    bench.run()
    bench.now += IDLE_S
    bench.chunks.release_idle(bench.now)
    assert (bench.reports[-1].num_wanted, bench.chunks.num_bytes) == (0, 0)
    assert not bench.chunks.is_wanted
    bench.chunks.set_grant(0, bench.now)
    assert bench.reports[-1].num_held == 0
    number = bench.start(scattered(8))
    bench.run()
    assert bench.reports[-1].num_wanted == 4
    bench.chunks.set_grant(4, bench.now)
    bench.run()
    assert bench.outcomes()[number].delivered


def test_a_read_of_an_ended_pull_that_never_ends_is_reported_as_lost() -> None:
    bench = Granting()
    bench.fabric.stalled.add(bench.agents[0])
    number = bench.start_granted(4)
    bench.run()
    bench.engine.abort(number)
    bench.run()
    assert bench.reports[-1].num_lost == 0
    bench.now += STUCK_S
    bench.run()
    assert bench.reports[-1].num_lost == 1
    num_reports = len(bench.reports)
    bench.run()
    assert len(bench.reports) == num_reports
    bench.fabric.stalled.clear()
    bench.run()
    assert bench.reports[-1].num_lost == 0, "it has ended after all"
    bench.start(scattered(8))
    bench.run()
    assert bench.chunks.count(ChunkState.FREE) > 0


@pytest.mark.parametrize(
    ("num_blocks", "is_chosen"),
    [((200, 200), [True, False]), ((8, 9, 8), [True, True, False]), ((16, 200), [True, False])],
)
def test_equal_layouts_are_read_directly_and_chosen_for_once(
    num_blocks: tuple[int, ...], is_chosen: list[bool]
) -> None:
    """A few blocks do not show how more of them lie, where blocks are unequal."""
    bench = Bench(chunk_bytes=CHUNK, always_covers=False, layout_here="HND")
    outcomes = [bench.pull(scattered(number)) for number in num_blocks]
    assert all(outcome.delivered for outcome in outcomes)
    assert [outcome.predicted_s > 0 for outcome in outcomes] == is_chosen
    assert set(states(bench)) == set()
