"""When blocks of requests that vLLM has preempted come back, and which models are published early.

A session without a daemon stands for the scheduler's: what it is asked to take back is recorded.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvxferd.client import Disconnected, Event, Released, TransferRef, make_ref
from kvxferd.errors import Code, KvxferdError
from kvxferd.integrations.vllm.layout.facts import CacheGroup, CacheKind
from kvxferd.integrations.vllm.layout.groups import CacheGroups
from kvxferd.integrations.vllm.session.early_pulls import (
    MAX_LATE_ABANDONS,
    REPEAT_ABANDON_S,
    EarlyPullLimits,
    EarlyPulls,
    LateAbandons,
)
from kvxferd.integrations.vllm.session.publishing import MAX_FREE_WAIT_S, Publishing
from kvxferd.integrations.vllm.session.stats import ConnectorStats
from kvxferd.integrations.vllm.session.step_metadata import WrittenSpec
from tests.support.connector_harness import GROUPS, CacheBlock, CachePool, Request, Status


class Session:
    """The calls of a publisher that are made."""

    is_connected, generation = True, "g1"

    def __init__(self) -> None:
        self.unpublished: list[str] = []
        self.is_over = False
        self.events: list[Event] = []

    def publish(self, transfer_id: str, *_: Any, nonce: str | None, **__: Any) -> TransferRef:
        return make_ref("tcp://10.0.0.1:9441", "e", "g1", transfer_id, nonce)

    def add_blocks(self, transfer_id: str, blocks: Any) -> None:
        if self.is_over:
            raise KvxferdError("cannot add blocks: the session is over")

    def unpublish(self, ref: TransferRef) -> None:
        if self.is_over:
            raise KvxferdError("cannot unpublish: the session is over")
        self.unpublished.append(ref.transfer_id)

    def poll(self) -> list[Event]:
        events, self.events = self.events, []
        return events


class Scheduler:
    """An engine's published transfers: a request of 16 tokens, of which 8 are computed and published."""

    def __init__(self) -> None:
        self.now = 100.0
        self.session: Any = Session()
        self.pool = CachePool()
        self.publishing = Publishing(GROUPS, ConnectorStats(), clock=lambda: self.now)
        self.publishing.publisher, self.publishing.cache = self.session, self.pool
        self.request = self.expect("r", "t")
        self.pool.give("r", [1, 2, 3, 4])
        self.publishing.advance(["r"], [])
        self.request.num_computed_tokens = 8
        assert self.publishing.advance(["r"], []) == [WrittenSpec("t", 8)]
        assert self.pool.kept == [1, 2]

    def expect(self, request_id: str, transfer_id: str, num_tokens: int = 16) -> Request:
        ref = make_ref("tcp://10.0.0.1:9441", "e", "g1", transfer_id).to_dict()
        request = Request(request_id, num_tokens, {"kvxferd": ref, "kvxferd_overlap": True})
        self.publishing.expect(request)
        return request

    def receive(self, event: Event) -> list[str]:
        self.session.events.append(event)
        return self.publishing.handle_events()

    def end(self, request: Request, *, is_computed: bool) -> TransferRef | None:
        return self.publishing.end(request, ([1, 2, 3, 4],), is_computed=is_computed)


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


def test_vllm_waits_for_a_preempted_request_s_blocks_for_a_second(scheduler: Scheduler) -> None:
    assert not scheduler.publishing.has_pending_frees()
    scheduler.request.status = Status.PREEMPTED
    assert scheduler.publishing.has_pending_frees()
    assert scheduler.session.unpublished == ["t"]
    scheduler.now += MAX_FREE_WAIT_S
    assert not scheduler.publishing.has_pending_frees(), "its reader is dead"
    assert scheduler.pool.kept == [1, 2]
    assert scheduler.receive(Released("t", Code.UNPUBLISHED)) == []
    assert scheduler.pool.kept == []


def test_a_transfer_is_taken_back_once_and_gets_another_id(scheduler: Scheduler) -> None:
    scheduler.publishing.advance(["r"], ["r"])
    scheduler.publishing.advance(["r"], ["r"])
    assert scheduler.session.unpublished == ["t"]
    scheduler.request.num_computed_tokens = 16
    again = scheduler.end(scheduler.request, is_computed=True)
    assert again is not None
    assert again.transfer_id.startswith("r~")


def test_one_that_is_aborted_in_the_queue_ends_for_those_who_wait_for_it(scheduler: Scheduler) -> None:
    waiting = scheduler.expect("r2", "t2")
    assert scheduler.end(waiting, is_computed=False) is None
    assert scheduler.session.unpublished == ["t2"]


@pytest.mark.parametrize(
    ("why", "is_published"), [(Code.LEASE_EXPIRED, True), (Code.ABANDONED, False), (Code.COMPLETED, False)]
)
def test_one_that_others_end_is_published_anew_where_somebody_may_read_it(
    scheduler: Scheduler, why: Code, is_published: bool
) -> None:
    scheduler.receive(Released("t", why))
    assert scheduler.pool.kept == []
    scheduler.request.num_computed_tokens = 12
    assert scheduler.publishing.advance(["r"], []) == []
    scheduler.request.num_computed_tokens = 16
    assert (scheduler.end(scheduler.request, is_computed=True) is not None) is is_published
    assert scheduler.session.unpublished == []


def test_the_end_of_the_session_frees_all(scheduler: Scheduler) -> None:
    ended = Request("ended", 16, {}, num_computed_tokens=16)
    assert scheduler.end(ended, is_computed=True) is not None
    assert scheduler.receive(Disconnected(Code.DAEMON_LOST, "x")) == ["ended"]
    assert scheduler.pool.kept == []


@pytest.mark.parametrize("computed", [12, 4])
def test_a_session_that_has_ended_ends_the_transfer(scheduler: Scheduler, computed: int) -> None:
    scheduler.session.is_over = True
    scheduler.request.num_computed_tokens = computed
    assert scheduler.publishing.advance(["r"], []) == []
    assert scheduler.pool.kept == []


def test_the_last_part_adds_the_blocks_that_were_not_published(scheduler: Scheduler) -> None:
    scheduler.request.num_computed_tokens = 16
    last = scheduler.end(scheduler.request, is_computed=True)
    assert last is not None
    assert last.transfer_id == "t"
    assert scheduler.pool.kept == [1, 2, 3, 4]
    assert scheduler.receive(Released("t", Code.COMPLETED)) == ["r"]
    assert scheduler.pool.kept == []


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
    request = scheduler.expect("long", "long", 400)
    scheduler.pool.give_blocks("long", blocks)
    scheduler.publishing.advance(["long"], [])
    for computed in range(8, 400, 8):
        request.num_computed_tokens = computed
        assert scheduler.publishing.advance(["long"], [])
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
    assert groups.can_be_read_early is possible


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
    early.remove("b")
    assert early.has_room(100), "one that is larger than the limit waits alone"
    early.add("c", 100)
    assert not early.has_room(1)


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
    for number in range(MAX_LATE_ABANDONS + 1):
        late.add(make_ref("tcp://10.0.0.1:9441", "e", "g1", f"t{number}"))
    now += REPEAT_ABANDON_S[-1]
    assert len(late.pop_due()) == MAX_LATE_ABANDONS
