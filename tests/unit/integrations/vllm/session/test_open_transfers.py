"""When blocks of requests that vLLM has preempted come back, and which models are published early.

A session without a daemon stands for the scheduler's: what it is asked to take back is recorded.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvxferd.client import TransferRef, make_ref
from kvxferd.errors import KvxferdError
from kvxferd.integrations.vllm.layout.facts import CacheGroup, CacheKind
from kvxferd.integrations.vllm.layout.groups import CacheGroups
from kvxferd.integrations.vllm.session.early_pulls import (
    MAX_LATE_ABANDONS,
    REPEAT_ABANDON_S,
    EarlyPullLimits,
    EarlyPulls,
    LateAbandons,
)
from kvxferd.integrations.vllm.session.open_transfers import MAX_FREE_WAIT_S, OpenTransfers
from tests.support.connector_harness import GROUPS, CacheBlock, CachePool, Request, Status


class Session:
    """The calls of a publisher that open transfers make."""

    is_connected, generation = True, "g1"

    def __init__(self) -> None:
        self.unpublished: list[str] = []
        self.is_over = False

    def publish(self, transfer_id: str, *_: Any, nonce: str, **__: Any) -> TransferRef:
        return make_ref("tcp://10.0.0.1:9441", "e", "g1", transfer_id, nonce)

    def add_blocks(self, transfer_id: str, blocks: Any) -> None:
        if self.is_over:
            raise KvxferdError("cannot add blocks: the session is over")

    def unpublish(self, ref: TransferRef) -> None:
        if self.is_over:
            raise KvxferdError("cannot unpublish: the session is over")
        self.unpublished.append(ref.transfer_id)


class Scheduler:
    """An engine's open transfers with a request of 16 tokens, of which 8 are computed and published."""

    def __init__(self) -> None:
        self.now = 100.0
        self.session: Any = Session()
        self.pool = CachePool()
        self.open = OpenTransfers(GROUPS, clock=lambda: self.now)
        self.open.bind(self.pool)
        self.request = Request("r", 16, {})
        self.pool.give("r", [1, 2, 3, 4])
        self.open.expect(self.request, make_ref("tcp://10.0.0.1:9441", "e", "g1", "t"))
        self.open.advance(self.session, ["r"], [])
        self.request.num_computed_tokens = 8
        (extended,) = self.open.advance(self.session, ["r"], [])
        assert (extended.ready_tokens, self.pool.kept) == (8, [1, 2])


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


def test_vllm_waits_for_a_preempted_request_s_blocks_for_a_second(scheduler: Scheduler) -> None:
    assert not scheduler.open.has_pending_frees(scheduler.session)
    scheduler.request.status = Status.PREEMPTED
    assert scheduler.open.has_pending_frees(scheduler.session)
    assert scheduler.session.unpublished == ["t"]
    scheduler.now += MAX_FREE_WAIT_S
    assert not scheduler.open.has_pending_frees(scheduler.session), "its reader is dead"
    assert scheduler.pool.kept == [1, 2]
    scheduler.open.released("t")
    assert scheduler.pool.kept == []


def test_a_transfer_is_taken_back_once(scheduler: Scheduler) -> None:
    scheduler.open.advance(scheduler.session, ["r"], ["r"])
    scheduler.open.advance(scheduler.session, ["r"], ["r"])
    assert scheduler.open.is_spent(scheduler.request)
    assert scheduler.open.end(scheduler.session, scheduler.request, ([1, 2, 3, 4],)) is None
    assert scheduler.session.unpublished == ["t"]


def test_one_that_is_aborted_in_the_queue_ends_for_those_who_wait_for_it(scheduler: Scheduler) -> None:
    waiting = Request("r2", 16, {})
    scheduler.open.expect(waiting, make_ref("tcp://10.0.0.1:9441", "e", "g1", "t2"))
    assert scheduler.open.end(scheduler.session, waiting, None) is None
    assert scheduler.session.unpublished == ["t2"]
    scheduler.open.released("t2")
    assert not scheduler.open.is_spent(waiting)


def test_one_that_ends_by_itself_is_not_continued(scheduler: Scheduler) -> None:
    scheduler.open.released("t")  # its lease has ended
    assert scheduler.pool.kept == []
    scheduler.request.num_computed_tokens = 12
    assert scheduler.open.advance(scheduler.session, ["r"], []) == []
    assert scheduler.open.is_spent(scheduler.request)
    assert scheduler.session.unpublished == []


def test_the_end_of_the_session_frees_all(scheduler: Scheduler) -> None:
    scheduler.open.released_all()
    assert scheduler.pool.kept == []


@pytest.mark.parametrize("computed", [12, 4])
def test_a_session_that_has_ended_ends_the_transfer(scheduler: Scheduler, computed: int) -> None:
    scheduler.session.is_over = True
    scheduler.request.num_computed_tokens = computed
    assert scheduler.open.advance(scheduler.session, ["r"], []) == []
    assert scheduler.pool.kept == []


def test_the_last_part_has_all_blocks_and_adds_those_that_were_not_published(scheduler: Scheduler) -> None:
    scheduler.request.num_computed_tokens = 16
    last = scheduler.open.end(scheduler.session, scheduler.request, ([1, 2, 3, 4],))
    assert last is not None
    assert list(last.blocks[GROUPS.names[0]].ids) == [1, 2, 3, 4]
    assert scheduler.pool.kept == [1, 2, 3, 4]


class CountedBlocks(list[CacheBlock]):
    """Blocks that count how many of them are read."""

    num_read = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.num_read += len(found) if isinstance(key, slice) else 1
        return found


def test_a_step_reads_the_blocks_that_it_adds(scheduler: Scheduler) -> None:
    """Steps that read all the blocks of a prompt so far would be quadratic over its prefill."""
    blocks = CountedBlocks(scheduler.pool.blocks[number] for number in [1, 2, 3, 4, 5] * 20)
    request = scheduler.request = Request("long", 400, {})
    scheduler.pool.give_blocks("long", blocks)
    scheduler.open.expect(request, make_ref("tcp://10.0.0.1:9441", "e", "g1", "long"))
    scheduler.open.advance(scheduler.session, ["long"], [])
    for computed in range(8, 400, 8):
        request.num_computed_tokens = computed
        assert scheduler.open.advance(scheduler.session, ["long"], [])
    assert blocks.num_read == 98


FULL = CacheGroup(0, CacheKind.FULL, 4)


@pytest.mark.parametrize(
    ("groups", "possible"),
    [
        (GROUPS, True),
        (CacheGroups((FULL, CacheGroup(1, CacheKind.FULL, 6)), 2), True),
        (CacheGroups((FULL, CacheGroup(1, CacheKind.SLIDING, 4, 9)), 2), False),
        (CacheGroups((FULL, CacheGroup(1, CacheKind.STATE, 4)), 2), False),
        (CacheGroups((FULL,), 1, lookahead_tokens=2), False),
    ],
    ids=["full", "two sizes", "window", "state", "draft of several modules"],
)
def test_which_models_are_published_early(groups: CacheGroups, possible: bool) -> None:
    transfers = OpenTransfers(groups)
    assert not transfers.is_possible, "vLLM has not given its cache manager"
    transfers.bind(CachePool())
    assert transfers.is_possible is possible


def test_whole_blocks_are_those_of_every_group() -> None:
    two = CacheGroups((FULL, CacheGroup(1, CacheKind.FULL, 6)), 2)
    assert [two.whole_blocks_tokens(n) for n in (0, 11, 12, 25)] == [0, 0, 12, 24]
    assert two.num_blocks(13) == 4 + 3


# --- how many requests and blocks of a decode engine may wait for running prefills


def test_requests_and_blocks_are_limited() -> None:
    early = EarlyPulls(EarlyPullLimits(num_requests=2, num_blocks=10))
    early.add("a", 6)
    assert early.has_room(4)
    assert not early.has_room(5)
    early.add("b", 1)
    assert not early.has_room(1), "two requests wait"
    early.remove("a")
    assert early.has_room(9)
    early.remove("a")  # its pull ends once, its request later
    assert not early.has_room(10)


def test_one_that_is_larger_than_the_limit_waits_alone() -> None:
    early = EarlyPulls(EarlyPullLimits(num_requests=2, num_blocks=10))
    assert early.has_room(100)
    early.add("a", 100)
    assert not early.has_room(1)
    early.remove("a")
    assert early.has_room(100)


def test_an_abandonment_is_repeated_for_a_while() -> None:
    now = 100.0
    late = LateAbandons(lambda: now)
    ref = make_ref("tcp://10.0.0.1:9441", "e", "g1", "t")
    late.add(ref)
    assert late.pop_due() == []
    num_reports = 0
    while now < 100 + REPEAT_ABANDON_S[-1]:
        now += 0.25
        num_reports += late.pop_due() == [ref]
    assert num_reports == len(REPEAT_ABANDON_S)
    assert late.pop_due() == []


def test_abandonments_that_are_repeated_are_limited() -> None:
    now = 100.0
    late = LateAbandons(lambda: now)
    for number in range(MAX_LATE_ABANDONS):
        late.add(make_ref("tcp://10.0.0.1:9441", "e", "g1", f"t{number}"))
    now += REPEAT_ABANDON_S[-1]
    assert len(late.pop_due()) == MAX_LATE_ABANDONS
