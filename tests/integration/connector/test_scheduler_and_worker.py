"""Requests travel from a prefill engine to a decode engine by the connector's two sides."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvxferd.errors import Code
from kvxferd.integrations.vllm.layout.facts import CacheGroup, CacheKind
from kvxferd.integrations.vllm.layout.groups import CacheGroups
from kvxferd.integrations.vllm.session.scheduler import ConnectorScheduler
from kvxferd.integrations.vllm.session.step_metadata import StepMetadata
from kvxferd.integrations.vllm.session.worker import MAX_DAEMON_WAIT_S
from tests.support.connector_harness import (
    BLOCK_TOKENS,
    GROUPS,
    Blocks,
    EngineUnderTest,
    Request,
    Status,
    collected,
)
from tests.support.nodes.daemon import Daemon
from tests.support.nodes.waiting import wait_until

Make = Callable[..., EngineUnderTest]
OWN_DAEMON = pytest.mark.parametrize("daemon", ["own"], indirect=True)


@pytest.fixture
def pair(engine: Make) -> tuple[EngineUnderTest, EngineUnderTest]:
    return engine("prefill", publishes=True), engine("decode")


Pair = tuple[EngineUnderTest, EngineUnderTest]


def test_a_prefilled_request_arrives_and_its_blocks_come_back(pair: Pair) -> None:
    prefill, decode = pair
    params = prefill.prefilled("p-1", 10, [3, 4, 5], fill=7)
    decode.decode("d-1", 10, [9, 8, 7], params)
    results = decode.step_until(lambda r: bool(r.received), "the pull is over")
    assert (results.received, results.failed) == ({"d-1"}, set())
    assert (decode.bytes[[9, 8]] == 7).all()
    assert (decode.bytes[7][: 2 * 64] == 7).all()  # the third block holds two of its four tokens
    assert prefill.step_until(lambda r: bool(r.sent), "the blocks come back").sent == {"p-1"}
    counted = collected(decode.worker)
    assert len(counted["pull_s"]) == 1
    assert counted["bytes"][0] >= 10 * 64


def test_only_what_is_not_cached_is_pulled(pair: Pair) -> None:
    prefill, decode = pair
    params = prefill.prefilled("p-1", 16, [1, 2, 3, 4], fill=5)
    decode.bytes[:] = 1
    decode.decode("d-1", 16, [10, 11, 12, 13], params, cached=2 * BLOCK_TOKENS)
    decode.step_until(lambda r: bool(r.received), "the pull is over")
    assert (decode.bytes[[10, 11]] == 1).all(), "blocks of a prefix hit may be others' as well"
    assert (decode.bytes[[12, 13]] == 5).all()


def test_a_full_prefix_hit_pulls_nothing_and_frees_the_prefill_engine(pair: Pair) -> None:
    prefill, decode = pair
    params = prefill.prefilled("p-1", 8, [1, 2], fill=5)
    decode.bytes[:] = 1
    decode.decode("d-1", 8, [10, 11], params, cached=8)
    assert not decode.step().received
    assert prefill.step_until(lambda r: bool(r.sent), "the blocks come back").sent == {"p-1"}
    assert (decode.bytes == 1).all()


def test_a_request_is_pulled_once(pair: Pair) -> None:
    """vLLM tells of the same request's blocks again when the load is over, or after a preemption."""
    prefill, decode = pair
    params = prefill.prefilled("p-1", 8, [1, 2], fill=5)
    request = decode.decode("d-1", 8, [10, 11], params)
    decode.step_until(lambda r: bool(r.received), "the pull is over")
    assert decode.scheduler.num_tokens_to_pull(request, 0) == 0
    assert decode.scheduler.build_step_metadata() == StepMetadata()


def test_a_request_that_is_aborted_before_it_was_scheduled_frees_the_prefill_engine(pair: Pair) -> None:
    prefill, decode = pair
    params = prefill.prefilled("p-1", 8, [1, 2], fill=5)
    request = Request("d-1", 8, dict(params))
    decode.scheduler.request_added(request)
    decode.abort(request, [])
    assert not decode.step().received
    assert prefill.step_until(lambda r: bool(r.sent), "the blocks come back").sent == {"p-1"}


def test_a_request_that_is_aborted_while_it_is_pulled_ends_once(pair: Pair) -> None:
    prefill, decode = pair
    params = prefill.prefilled("p-1", 8, [1, 2], fill=5)
    request = decode.decode("d-1", 8, [10, 11], params)
    decode.abort(request, [10, 11])  # before the workers have heard of the pull
    assert decode.step_until(lambda r: bool(r.received), "the pull is over").received == {"d-1"}
    assert prefill.step_until(lambda r: bool(r.sent), "the blocks come back").sent == {"p-1"}


def test_an_aborted_prefill_is_not_published(pair: Pair) -> None:
    prefill, _ = pair
    request = Request("p-1", 8, {"do_remote_decode": True}, num_computed_tokens=4)
    prefill.scheduler.request_added(request)
    prefill.abort(request, [1])
    assert prefill.scheduler.build_step_metadata() == StepMetadata()


def test_another_router_s_parameters_leave_the_request_to_be_computed(pair: Pair) -> None:
    _, decode = pair
    foreign = {"do_remote_prefill": True, "remote_engine_id": "x", "remote_block_ids": [[1]]}
    request = Request("d-1", 8, foreign)
    decode.scheduler.request_added(request)
    assert decode.scheduler.num_tokens_to_pull(request, 0) == 0
    decode.abort(request, [])
    assert decode.scheduler.build_step_metadata() == StepMetadata()
    counted = collected(decode.scheduler)
    assert counted["pulls_failed"] == {"transfer-unknown": 1}


def test_an_engine_that_must_not_be_written_into_computes_by_itself(pair: Pair) -> None:
    """vLLM gives the blocks of a kv_producer away while its steps may still write them."""
    prefill, _ = pair
    params = prefill.prefilled("p-1", 8, [1, 2], fill=5)
    scheduler = ConnectorScheduler(GROUPS, may_pull=False)
    request = Request("d-1", 8, params)
    scheduler.request_added(request)
    assert scheduler.num_tokens_to_pull(request, 0) == 0
    scheduler.blocks_allocated(request, Blocks(([10, 11],)), 0)
    assert scheduler.build_step_metadata() == StepMetadata()
    counted = collected(scheduler)
    assert counted["pulls_failed"] == {"not-allowed": 1}


def test_a_failed_pull_names_its_request(pair: Pair) -> None:
    prefill, decode = pair
    params = prefill.prefilled("p-1", 8, [1, 2], fill=5)
    params["kvxferd"]["nonce"] = "0" * 32
    decode.decode("d-1", 8, [10, 11], params)
    results = decode.step_until(lambda r: bool(r.received), "the pull is over")
    assert (results.received, results.failed) == ({"d-1"}, {"d-1"})


def one_group(kind: CacheKind, kept_tokens: int | None = None) -> CacheGroups:
    return CacheGroups((CacheGroup(0, kind, BLOCK_TOKENS, kept_tokens),), num_listed=1)


@pytest.mark.parametrize("recomputes", [True, False])
def test_blocks_that_no_pull_can_use_fail_the_load(engine: Make, recomputes: bool) -> None:
    """vLLM cannot be refused once it has allocated: an error there would end the engine.

    Where this engine computes the prompt itself, the prefill engine has its blocks back. Otherwise a router
    may send the request to another decode engine, which reads by the same reference.
    """
    prefill = engine("prefill", publishes=True)
    groups = one_group(CacheKind.SLIDING, kept_tokens=8)
    decode = engine("decode", groups=groups, recomputes_failed=recomputes)
    params = prefill.prefilled("p-1", 16, [1, 2, 3, 4], fill=5)
    decode.decode("d-1", 16, [0, 0, 0, 13], params)
    results = decode.step_until(lambda r: bool(r.received), "the pull is over")
    assert (results.received, results.failed) == ({"d-1"}, {"d-1"})
    counted = collected(decode.worker)
    assert counted["pulls_failed"] == {"blocks-invalid": 1}
    if not recomputes:
        other = engine("other-decode")
        other.decode("d-2", 16, [1, 2, 3, 4], params)
        assert not other.step_until(lambda r: bool(r.received), "the pull is over").failed
        assert (other.bytes[[1, 2, 3, 4]] == 5).all()
    assert prefill.step_until(lambda r: bool(r.sent), "the blocks come back").sent == {"p-1"}


@pytest.mark.parametrize(
    ("groups", "ids", "num_computed"),
    [
        (one_group(CacheKind.SLIDING, kept_tokens=4), [0, 0, 0, 4], 18),
        (one_group(CacheKind.STATE), [7], 14),
    ],
    ids=["the window has moved on", "the state has moved on"],
)
def test_a_prefill_that_went_beyond_its_prompt_is_not_published(
    engine: Make, groups: CacheGroups, ids: list[int], num_computed: int
) -> None:
    """A router forgot max_tokens = 1. What the reader needs is gone, and the engine has to live on."""
    prefill = engine("prefill", publishes=True, groups=groups)
    request = Request("p-1", 12, {"do_remote_decode": True}, num_computed_tokens=num_computed)
    request.status = Status.FINISHED_LENGTH_CAPPED
    assert prefill.scheduler.request_ended(request, (ids,)) == (False, None)
    counted = collected(prefill.scheduler)
    assert counted["publishes_failed"] == {"blocks-invalid": 1}


def test_unread_blocks_come_back_when_the_lease_ends(engine: Make) -> None:
    prefill = engine("prefill", publishes=True, lease_s=0.5)
    assert prefill.prefill("p-1", 8, [1, 2], fill=5) is not None
    assert prefill.step_until(lambda r: bool(r.sent), "the blocks come back").sent == {"p-1"}
    counted = collected(prefill.scheduler)
    assert counted["released_unread"] == {"lease-expired": 1}


@OWN_DAEMON
def test_a_pull_fails_when_the_daemon_dies_and_the_next_one_works(engine: Make, daemon: Daemon) -> None:
    prefill, decode = engine("prefill", publishes=True, lease_s=60), engine("decode", deadline_s=5)
    params = prefill.prefilled("p-1", 8, [1, 2], fill=5)
    daemon.kill()
    decode.decode("d-1", 8, [10, 11], params)
    results = decode.step_until(lambda r: bool(r.received), "the pull is over", 10)
    assert (results.received, results.failed) == ({"d-1"}, {"d-1"})
    daemon.start()
    decode.bytes[:] = 0
    wait_until(lambda: prefill.publisher.is_connected, "the new daemon knows the prefill engine")
    for attempt in range(10):  # until both engines are registered there, and its new port is in references
        again = prefill.prefill(f"p-2.{attempt}", 8, [3, 4], fill=6)
        assert again is not None
        decode.decode(f"d-2.{attempt}", 8, [12, 13], again)
        if not decode.step_until(lambda r: bool(r.received), "the pull is over", 10).failed:
            break
    assert (decode.bytes[[12, 13]] == 6).all()


@OWN_DAEMON
def test_without_a_daemon_nothing_is_published_and_no_pull_waits_for_long(
    engine: Make, daemon: Daemon
) -> None:
    prefill, decode = engine("prefill", publishes=True), engine("decode", deadline_s=60)
    params = prefill.prefill("p-1", 8, [1, 2], fill=5)
    daemon.kill()
    both = (prefill.publisher, decode.rank)
    wait_until(lambda: not any(one.is_connected for one in both), "the daemon is missed")
    assert prefill.prefill("p-2", 8, [3, 4], fill=6) is None
    counted = collected(prefill.scheduler)
    assert counted["publishes_failed"] == {Code.DAEMON_LOST.value: 1}
    decode.decode("d-1", 8, [10, 11], params)
    results = decode.step_until(lambda r: bool(r.received), "the pull is over", MAX_DAEMON_WAIT_S + 5)
    assert (results.received, results.failed) == ({"d-1"}, {"d-1"})


def test_a_scheduler_without_a_publisher_leaves_the_request_to_its_reader(engine: Make) -> None:
    decode = engine("decode")
    assert decode.prefill("p-1", 8, [1, 2], fill=5) is None


class Work:
    """What an engine has launched."""

    def __init__(self) -> None:
        self.is_done = False
        self.asked = threading.Event()

    def query(self) -> bool:
        self.asked.set()
        return self.is_done


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_nothing_is_read_before_what_was_launched_is_done(engine: Make, who: str) -> None:
    """Neither from blocks nor into blocks that a draft of the step before still writes."""
    work = Work()
    prefill = engine("prefill", publishes=True, launched=(lambda: work) if who == "prefill" else None)
    decode = engine("decode", launched=(lambda: work) if who == "decode" else None)
    params = prefill.prefilled("p-1", 8, [1, 2], fill=0)
    prefill.step()
    decode.decode("d-1", 8, [10, 11], params)
    decode.bytes[[10, 11]] = 1
    assert not decode.step().received
    assert work.asked.wait(10)
    assert not decode.step().received
    prefill.bytes[[1, 2]] = 9  # the draft's last kernel
    work.is_done = True
    assert not decode.step_until(lambda r: bool(r.received), "the pull is over").failed
    assert (decode.bytes[[10, 11]] == 9).all()
