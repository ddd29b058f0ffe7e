"""The pull engine over the in-memory transport: fairness, limits, and what it says of failures."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvxferd.errors import Code, DeviceError
from kvxferd.ids import Digest, PullId, Rank, RegionId
from kvxferd.layout import PackedBlocks
from kvxferd.mover.chunks.slices import MAX_DESCRIPTORS, MAX_RUN_BYTES, SliceBudget, Slicer
from kvxferd.mover.reads import pull_engine
from kvxferd.mover.reads.pull_state import PullState
from kvxferd.mover.transport.base import ReadHandle, TransportError
from kvxferd.mover.transport.staging import NUM_SLOTS
from kvxferd.plan import Runs
from kvxferd.wire.common import RegionAddress
from kvxferd.wire.mover import (
    FenceLocation,
    PullDone,
    PullProgress,
    SourceRank,
    StartPull,
)
from tests.support.fake_driver import FakeDriver
from tests.support.mover_harness import GROUP
from tests.support.pull_engine_harness import BLOCKS, DIGEST, WORD, Bench, FakeDeviceMemory, scattered


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_bytes_arrive_and_the_fence_is_read_last(bench: Bench) -> None:
    outcome = bench.pull(scattered(8))
    assert (outcome.delivered, outcome.started, outcome.finished) == (True, True, True)
    assert bench.fabric.posts[-1] == (bench.agents[0], 1)
    heads = bench.local.array.reshape(4, BLOCKS, 2, -1)
    for rank, memory in enumerate(bench.remote):
        theirs = memory.array.reshape(4, BLOCKS, -1)
        assert np.array_equal(heads[:, ::2, rank][:, :8], theirs[:, ::2][:, :8])
    assert not heads[:, 1::2].any()
    assert outcome.bytes == 8 * 4 * heads[0, 0].size


def test_the_time_of_each_phase_is_reported(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for 5 s; a part takes 1 s to expand, or to find that it was the last, and a post 2 s."""
    reader, expand = bench.fabric.agents[bench.reader], PullState.expand_next_part
    post = reader.post

    def slow_post(*arguments: Any) -> ReadHandle:
        bench.now += 2.0
        return post(*arguments)

    def slow_expansion(pull: PullState) -> None:
        bench.now += 1.0
        expand(pull)

    monkeypatch.setattr(reader, "post", slow_post)
    monkeypatch.setattr(PullState, "expand_next_part", slow_expansion)
    number = bench.start(scattered(8))
    bench.now += 5.0
    bench.run()
    told = bench.outcomes()[number]
    times = (told.queue_s, told.expand_s, told.post_s, told.wire_s, told.fence_s)
    assert times == (5.0, 2.0, 6.0, 4.0, 2.0), "two agents, and the fence word"


def test_short_pulls_go_ahead_but_not_for_ever(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of short pulls that never dries up leaves a large one its share of the posts."""
    monkeypatch.setattr(SliceBudget, "START_BYTES", 1 << 20)
    large = bench.start(scattered(250))
    bench.engine.step()
    done: list[PullId] = []
    short: set[PullId] = set()
    for _ in range(2000):
        if len(short.difference(done)) < 3:
            short.add(bench.start(range(1)))
        bench.engine.step()
        done += [m.pull for m in bench.engine.outbox if isinstance(m, PullDone)]
        bench.drain()
        if large in done:
            break
    assert large in done
    assert done.index(large) > pull_engine.MAX_SHORT_PULLS_IN_A_ROW


def test_posts_are_bounded_and_those_that_do_not_end_leave_others_their_turn(bench: Bench) -> None:
    bench.fabric.stalled |= set(bench.agents)
    for _ in range(20):
        bench.start(scattered(250))
    bench.run()
    num_posts = len(bench.fabric.posts)
    assert bench.engine.num_inflight == num_posts == pull_engine.MAX_INFLIGHT
    assert max(num for _, num in bench.fabric.posts) <= MAX_DESCRIPTORS
    bench.now += 2 * pull_engine.STALLED_S
    bench.run()
    assert len(bench.fabric.posts) > num_posts
    bench.fabric.stalled.clear()
    bench.run()
    assert [o.delivered for o in bench.outcomes().values()] == [True] * 20
    assert not bench.engine.is_busy


@pytest.mark.parametrize(("num_pulls", "num_posts"), [(1, 2), (2, 3 + 3)])
def test_a_pull_that_is_alone_is_posted_in_fewer_slices(bench: Bench, num_pulls: int, num_posts: int) -> None:
    bench.fabric.stalled.update(bench.agents)
    for _ in range(num_pulls):
        bench.start(scattered(200))
    bench.run()
    assert bench.engine.num_inflight == num_posts, "one from each agent, or as many as a pull may have"
    bench.fabric.stalled.clear()
    bench.run()
    assert all(outcome.delivered for outcome in bench.outcomes().values())


def test_an_abort_waits_for_what_is_posted(bench: Bench) -> None:
    bench.fabric.stalled |= set(bench.agents)
    number = bench.start(scattered(8))
    bench.run()
    bench.engine.abort(number)
    bench.now += 60.0
    bench.run()
    assert bench.reported == []
    posted = list(bench.fabric.posts)
    bench.fabric.stalled.clear()
    bench.run()
    outcome = bench.outcomes()[number]
    assert (outcome.started, outcome.finished, outcome.code) == (True, True, Code.CANCELLED)
    assert bench.fabric.posts == posted, "an aborted pull posts no fence read either"
    bench.engine.abort(number)
    bench.run()
    assert len(bench.reported) == 1


def test_a_lost_agent_ends_the_pull_and_is_loaded_again(bench: Bench) -> None:
    bench.fabric.errors[bench.agents[1]] = TransportError("gone", settled=True, lost=True)
    outcome = bench.pull(scattered(8))
    assert (outcome.delivered, outcome.finished, outcome.code) == (False, True, Code.TRANSPORT)
    assert outcome.agent == bench.agents[1]
    assert bench.pull(scattered(8)).delivered


@pytest.mark.parametrize("settled", [True, False])
def test_what_is_still_under_way_after_a_failure_is_told_later_unless_it_left_doubt(
    bench: Bench, settled: bool
) -> None:
    bench.fabric.stalled.add(bench.agents[0])
    bench.fabric.errors[bench.agents[1]] = TransportError("gone", settled=settled, lost=True)
    number = bench.start(scattered(8))
    bench.run()
    assert bench.reported == [], "the other read may end in a moment"
    bench.now += pull_engine.FAILED_PULL_WAIT_S
    bench.run()
    outcome = bench.outcomes()[number]
    assert (outcome.finished, outcome.quiesced_follows, outcome.code) == (False, settled, Code.TRANSPORT)
    assert bench.quiet() == []
    bench.fabric.stalled.clear()
    bench.run()
    assert bench.quiet() == ([number] if settled else [])
    assert not bench.engine.is_busy


@pytest.mark.parametrize("is_posted", [False, True])
@pytest.mark.parametrize("agent", [0, 1])
def test_an_agent_is_not_dropped_under_a_pull(bench: Bench, agent: int, is_posted: bool) -> None:
    bench.fabric.stalled.add(bench.agents[agent])
    number = bench.start(scattered(8))
    if is_posted:
        bench.run()
    bench.engine.drop_remote(bench.agents[agent])
    bench.fabric.stalled.clear()
    bench.run()
    assert bench.outcomes()[number].delivered
    assert "not known here" in bench.pull(scattered(8)).message
    bench.load()
    number = bench.start(scattered(8))
    bench.engine.drop_remote(bench.agents[agent])
    bench.load()
    bench.run()
    assert bench.outcomes()[number].delivered
    assert bench.pull(scattered(8)).delivered, "it was loaded again before it could be dropped"


@pytest.mark.slow
def test_more_fence_reads_than_slots(bench: Bench) -> None:
    numbers = [bench.start(range(1)) for _ in range(1100)]
    bench.run()
    assert all(bench.outcomes()[number].delivered for number in numbers)


def test_nothing_is_delivered_before_there_is_a_slot_for_its_word(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(bench.engine._word_slots, "acquire", lambda: None)
        number = bench.start(scattered(8))
        bench.run()
        assert bench.reported == []
    bench.run()
    assert bench.outcomes()[number].delivered


def test_a_pull_is_read_by_the_plan_that_was_known_when_it_came(bench: Bench) -> None:
    number = bench.start(scattered(8))
    bench.engine.drop_plan(DIGEST)
    bench.run()
    assert bench.outcomes()[number].delivered
    bench.engine.load_plan(Digest("damaged"), b"\xc1")
    for plan in (DIGEST, Digest("damaged"), Digest("never seen")):
        outcome = bench.pull(range(1), plan=plan)
        assert (outcome.delivered, outcome.started, outcome.code) == (False, False, Code.INTERNAL)
        assert "it is not known here" in outcome.message


def test_a_request_that_breaks_the_arithmetic_is_one_failed_pull(bench: Bench) -> None:
    bench.engine.start(
        StartPull(
            pull=PullId(77),
            plan=DIGEST,
            sources=(),
            local={GROUP: PackedBlocks(b"")},
            remote={},
            num_tokens=0,
            fence=FenceLocation(bench.agents[0], 0, WORD),
        )
    )
    assert bench.pull(range(4)).delivered
    assert bench.outcomes()[PullId(77)].code is Code.INTERNAL


@pytest.mark.parametrize("seed", range(20))
def test_every_pull_ends_once_whatever_fails(bench: Bench, seed: int) -> None:
    rng = random.Random(seed)
    bench.fabric.polls_per_read = rng.randint(0, 3)
    numbers = []
    for _ in range(60):
        match rng.randint(0, 7):
            case 0:
                lost = rng.random() < 0.5
                fault = TransportError("injected", settled=lost or rng.random() < 0.5, lost=lost)
                bench.fabric.errors[rng.choice(bench.agents)] = fault
            case 1:
                bench.engine.remote_agents.drop(rng.choice(bench.agents))
            case 2:
                bench.fabric.stalled ^= {rng.choice(bench.agents)}
            case 3 if numbers:
                bench.engine.abort(rng.choice(numbers))
            case 4:
                bench.load()
            case _:
                start = rng.randint(0, 100)
                word = WORD if rng.random() < 0.8 else bytes(16)
                numbers.append(bench.start(range(start, start + rng.randint(0, 60)), word))
        for _ in range(rng.randint(0, 5)):
            bench.engine.step()
        bench.now += rng.choice([0.0, 0.0, pull_engine.FAILED_PULL_WAIT_S])
    bench.fabric.stalled.clear()
    bench.run()
    assert not bench.engine.is_busy
    outcomes = bench.outcomes()
    assert sorted(outcomes) == numbers
    for number in bench.quiet():
        assert outcomes[number].finished is False
    for outcome in outcomes.values():
        assert outcome.delivered == (outcome.code is None)


def test_slices_cover_the_runs_and_keep_to_their_budget() -> None:
    length = np.array([3 * MAX_RUN_BYTES + 5, 1, MAX_RUN_BYTES] + [4096] * 5000, dtype=np.uint64)
    local = np.cumsum(length) - length
    slicer = Slicer(Runs(local + np.uint64(1000), local + np.uint64(7), length))
    assert (slicer.num_runs, slicer.num_bytes) == (len(length), int(length.sum()))
    at = 0
    while not slicer.is_empty:
        piece = slicer.next_slice(8 << 20)
        assert 0 < len(piece.length) <= MAX_DESCRIPTORS
        assert piece.length.sum() <= 8 << 20
        for offset, to, source in zip(piece.length, piece.local, piece.remote, strict=True):
            assert (int(to), int(source)) == (at + 1000, at + 7)
            at += int(offset)
    assert at == length.sum()
    one = Slicer(Runs(*(column[:1] for column in (local, local, length))))
    assert len(one.next_slice(1).length) == 1, "a slice has at least one descriptor"


def test_a_budget_follows_the_time_that_slices_take() -> None:
    budget = SliceBudget()
    for _ in range(20):
        budget.update(0.1, was_full=True)
    assert budget.bytes == SliceBudget.MIN_BYTES
    budget.update(0.0, was_full=False)
    assert budget.bytes == SliceBudget.MIN_BYTES, "a slice that was not full says nothing"
    for _ in range(20):
        budget.update(0.0, was_full=True)
    assert budget.bytes == SliceBudget.MAX_BYTES


def test_a_pull_of_many_runs_is_worked_out_in_parts() -> None:
    """Memory is bounded by the part, not by the request; what arrives and what is told stay the same."""
    whole, parts = Bench(), Bench(max_runs=16)
    for one in (whole, parts):
        assert one.pull(scattered(200)).delivered
    assert (whole.local.array == parts.local.array).all()
    (first,), (second,) = whole.outcomes().values(), parts.outcomes().values()
    assert first.bytes == second.bytes
    assert second.runs >= first.runs > 16


def test_a_word_that_changes_between_two_parts_is_no_delivery() -> None:
    bench = Bench(max_runs=16)
    number = bench.start(scattered(200))
    bench.engine.step()
    bench.fence.page[0:16] = bytes(16)
    bench.run()
    outcome = bench.outcomes()[number]
    assert (outcome.delivered, outcome.finished, outcome.code) == (False, True, Code.RELEASED)


# --- memory that is staged


@pytest.fixture
def staging() -> Iterator[Bench]:
    """A bench whose reads land in slots of 512 bytes."""
    driver = FakeDriver()
    made = Bench(driver=driver)
    assert isinstance(made.local, FakeDeviceMemory)
    made.staged._slot_bytes = 512
    span = made.local.span
    made.staged.stage(driver, made.local.uuid, [span])
    region = RegionAddress(
        RegionId("kv"), span.address, span.size_bytes, span.device, span.mem_type, (), True
    )
    made.engine.bind([region])
    yield made
    made.close()


def test_a_pull_without_a_slot_has_not_started_waits_for_nobody_and_ends_with_its_abort(
    staging: Bench,
) -> None:
    """Others' reads hold the slots. Its sources are not to blame, and nothing writes its blocks."""
    slots = staging.staged._slots
    assert slots is not None
    taken = [slots.acquire() for _ in range(NUM_SLOTS)]
    number = staging.start(scattered(4))
    staging.run()
    staging.engine.report_progress(number)
    staging.drain()
    assert staging.reported == [PullProgress(pull=number, phase="plan", agents=())]
    staging.engine.abort(number)
    staging.drain()
    outcome = staging.outcomes()[number]
    assert (outcome.started, outcome.finished, outcome.code) == (False, True, Code.CANCELLED)
    slots.release(taken[0] or 0)
    staging.run()
    assert not staging.fabric.posts


def test_an_aborted_pull_stages_no_more_parts(staging: Bench) -> None:
    staging.fabric.polls_per_read = 2
    number = staging.start(scattered(250))
    for _ in range(3):
        staging.engine.step()
    num_posts = len(staging.fabric.posts)
    assert num_posts
    staging.engine.abort(number)
    staging.run()
    assert staging.outcomes()[number].finished
    assert len(staging.fabric.posts) == num_posts


def test_a_short_pull_stages_from_few_agents_at_a_time(
    staging: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one that reads eight ranks of a source that is stopped holds all slots."""
    monkeypatch.setattr(pull_engine, "MAX_INFLIGHT_PER_PULL", 1)
    staging.fabric.stalled |= set(staging.agents)
    staging.start(scattered(1))
    staging.run()
    assert len(staging.fabric.posts) == 1
    staging.fabric.stalled.clear()
    staging.run()
    assert [outcome.delivered for outcome in staging.outcomes().values()] == [True]


# --- a GPU that wants to be flushed


class Gpu:
    """Counts flushes, and what had ended before each; refuses on demand."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.flushes: list[int] = []
        self.refuses = False
        bench.engine.bind([RegionAddress(RegionId("kv"), *bench.local.span[:2])], self.flush)

    def flush(self) -> None:
        if self.refuses:
            raise DeviceError("cannot cuFlushGPUDirectRDMAWrites")
        self.flushes.append(len(self.bench.outcomes()))
        assert not self.bench.engine.num_inflight


def test_a_gpu_is_flushed_before_a_pull_is_delivered_or_its_blocks_are_free(bench: Bench) -> None:
    gpu = Gpu(bench)
    number = bench.start(scattered(8), plan=Digest("unknown"))
    bench.run()
    assert not bench.outcomes()[number].started
    assert gpu.flushes == [], "nothing of it was read"
    for num_ended in range(1, 3):
        assert bench.pull(scattered(8)).delivered
        assert gpu.flushes == list(range(1, num_ended + 1)), "once, before the pull ended"
    bench.fabric.polls_per_read = 2
    bench.fabric.errors[bench.agents[1]] = TransportError("gone", settled=True, lost=True)
    outcome = bench.pull(scattered(8))
    assert (outcome.delivered, outcome.finished, gpu.flushes) == (False, True, [1, 2, 3])
    gpu.refuses = True
    outcome = bench.pull(scattered(8))
    assert (outcome.delivered, outcome.finished, outcome.quiesced_follows) == (False, False, False)
    assert outcome.code is Code.DEVICE_ERROR


# --- when a pull reads its fence word


def test_the_word_waits_for_parts_that_are_not_expanded() -> None:
    """Whatever keeps the engine from expanding the next part at once."""
    agent = Bench().agents[0]
    source = SourceRank(Rank(0, 0), agent, tuple[RegionAddress, ...]())
    fence = FenceLocation(agent, 64, WORD)
    request = StartPull(PullId(1), DIGEST, (source,), {}, {}, 4, fence)
    pull = PullState(request, arrived_at=0.0, loaded=None, was_alone=True, parts=iter([{}]), num_runs=1)
    assert not pull.needs_fence_read
    pull.expand_next_part()
    assert not pull.needs_fence_read
    pull.expand_next_part()
    assert pull.needs_fence_read
    pull.queue_s, pull.started = 0.0, True
    assert pull.phase == "wire"
    pull.fence_posted_at = 1.0
    assert pull.phase == "fence"
