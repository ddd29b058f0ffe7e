"""The source's side: fence words, slots, readiness, releases."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from kvxferd.client import BlockList, Publisher, PublishRefused, RankHandle, Released, Suspended
from kvxferd.errors import BusyError, Code, EngineError, KvxferdError
from kvxferd.ids import Rank
from kvxferd.layout import unpack_ids
from kvxferd.memory import FencePage
from kvxferd.wire import worker
from kvxferd.wire.limits import FENCE_SLOTS
from tests.support.client_harness import REGION, Kernel, Stage, blocks, events_of, one_event
from tests.support.nodes.waiting import wait_until
from tests.support.scripted_daemon import ENDPOINT, WAIT_S, DaemonSide

EMPTY = bytes(16)
FIRST, SECOND = Rank(0, 0), Rank(0, 1)
BOTH = ((FIRST, "a1"), (SECOND, "b1"))


def test_the_fence_word_is_there_before_the_publish_is_sent(stage: Stage) -> None:
    rank = stage.rank(lease_s=45.0)
    ref = rank.publish("req-1", blocks(4, 5, first_token=32), num_tokens=64, num_readers=2, lease_s=12.0)
    publish = stage.side.expect(worker.Publish)
    assert stage.side.page.read(publish.fence_slot) != EMPTY
    assert (publish.transfer_id, publish.num_tokens, publish.num_readers) == ("req-1", 64, 2)
    assert list(unpack_ids(publish.blocks["full"].ids)) == [4, 5]
    assert publish.blocks["full"].first_token == 32
    assert 11.0 < publish.lease_s <= 12.0
    assert (ref.endpoint, ref.engine_id, ref.generation) == (ENDPOINT, "decode-0", "g1")
    assert ref.nonce == publish.nonce
    assert len(bytes.fromhex(ref.nonce)) == 16
    assert json.loads(ref.to_json()) == ref.to_dict()
    assert 44.0 < stage.publish(rank, "req-2").lease_s <= 45.0, "the daemon's, unless one is named"


def test_the_requests_trace_goes_to_the_daemon_and_into_the_reference(stage: Stage) -> None:
    rank = stage.rank()
    traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
    ref = rank.publish("req-1", blocks(), num_tokens=48, traceparent=traceparent)
    assert stage.side.expect(worker.Publish).traceparent == traceparent
    assert json.loads(ref.to_json())["traceparent"] == traceparent
    plain = rank.publish("req-2", blocks(), num_tokens=48, traceparent="not one")  # ignored
    assert stage.side.expect(worker.Publish).traceparent == ""
    assert "traceparent" not in plain.to_dict()
    others = f"00-{'a' * 32}-{'c' * 16}-00"
    for given, sent in (
        (ref, traceparent),
        (ref.with_trace(others), others),
        (ref.with_trace("not one"), ""),
    ):
        rank.pull(given, blocks(), num_tokens=48, deadline_s=9)
        assert stage.side.expect(worker.PullRequest).ref.traceparent == sent


@pytest.mark.parametrize("says", ["released", "refused"])
def test_the_word_is_overwritten_before_the_engine_hears_that_it_is_over(stage: Stage, says: str) -> None:
    rank = stage.rank()
    publish = stage.publish(rank)
    word = stage.side.page.read(publish.fence_slot)
    with pytest.raises(EngineError, match="not released yet") as taken:
        stage.publish(rank)
    assert taken.value.code is Code.TRANSFER_EXISTS
    if says == "released":
        stage.side.say(worker.Released(transfer_id="req-1", why=Code.COMPLETED))
        assert one_event(rank) == Released("req-1", Code.COMPLETED)
    else:
        stage.side.say(
            worker.PublishRefused(transfer_id="req-1", code=Code.BLOCKS_INVALID, message="block 99 of 16")
        )
        assert one_event(rank) == PublishRefused("req-1", Code.BLOCKS_INVALID, "block 99 of 16")
    assert stage.side.page.read(publish.fence_slot) != word
    if says == "refused":
        stage.publish(rank)  # nobody has read it: the name is free again
    else:
        with pytest.raises(EngineError, match="used once in a generation"):
            stage.publish(rank)


def test_slots_run_out_and_come_back(stage: Stage) -> None:
    rank = stage.rank()
    one = blocks(1)
    for number in range(FENCE_SLOTS):
        rank.publish(f"req-{number}", one, num_tokens=16)
    slots = [stage.side.expect(worker.Publish).fence_slot for _ in range(FENCE_SLOTS)]
    assert sorted(slots) == list(range(FENCE_SLOTS))
    assert len({stage.side.page.read(slot) for slot in slots}) == FENCE_SLOTS
    with pytest.raises(BusyError, match="wait for a Released") as busy:
        rank.publish("one-more", one, num_tokens=16)
    assert busy.value.retry_after_s > 0
    stage.side.say(worker.Released(transfer_id="req-77", why=Code.COMPLETED))
    one_event(rank)
    assert stage.publish(rank, "one-more").fence_slot == slots[77]


def test_ids_may_be_changed_once_publish_has_returned(stage: Stage) -> None:
    rank = stage.rank()
    ids = np.array([7, 8, 9], dtype=np.int32)
    rank.publish("req-1", {"full": BlockList(ids=ids)}, num_tokens=48)
    ids[:] = 0
    assert list(unpack_ids(stage.side.expect(worker.Publish).blocks["full"].ids)) == [7, 8, 9]


@pytest.mark.parametrize(
    "ids",
    [[7, 8], (7, 8), array("i", [7, 8]), memoryview(array("i", [7, 8])), np.array([7, 8], dtype=np.int32)],
    ids=["list", "tuple", "array", "memoryview", "numpy"],
)
def test_forms_of_ids(stage: Stage, ids: object) -> None:
    rank = stage.rank()
    rank.publish("req-1", {"full": BlockList(ids=ids)}, num_tokens=np.int64(32))
    assert list(unpack_ids(stage.side.expect(worker.Publish).blocks["full"].ids)) == [7, 8]


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        (BlockList(ids=np.array([1, 2])), "format 'l'"),  # int64 would be cut
        (BlockList(ids=np.array([1.0], dtype=np.float32)), "format 'f'"),
        (BlockList(ids=np.array([[1, 2]], dtype=np.int32)), "2 dimensions"),
        (BlockList(ids=[1 << 40]), "full"),
        (BlockList(ids=["a"]), "full"),
        (BlockList(ids=b"abcd"), "format 'B'"),
        (BlockList(ids=None), "full"),
        (BlockList(ids=[1, 2], borrowed=True), "full"),  # only one block of memory can be lent
        (BlockList(ids=np.array([1, 2]), borrowed=True), "full"),
        (BlockList(ids=np.arange(8, dtype=np.int32)[::2], borrowed=True), "full"),
        (BlockList(ids=np.array([[1, 2]], dtype=np.int32), borrowed=True), "full"),
    ],
)
def test_ids_that_are_refused_here(stage: Stage, listed: BlockList, words: str) -> None:
    rank = stage.rank()
    with pytest.raises(EngineError, match=words) as refused:
        rank.publish("req-1", {"full": listed}, num_tokens=32)
    assert refused.value.code is Code.BLOCKS_INVALID
    assert stage.side.is_silent()


def test_closing_overwrites_every_word_first(stage: Stage) -> None:
    rank = stage.rank()
    slot = stage.publish(rank).fence_slot
    word = stage.side.page.read(slot)
    rank.close()
    assert stage.side.page.read(slot) != word
    assert rank.poll() == [Released("req-1", Code.PUBLISHER_GONE)]
    assert rank.fileno() == -1


def test_a_publisher_without_memory_publishes(stage: Stage) -> None:
    """It knows no groups and no sizes: only the engine's ranks have layouts, and the daemon checks."""
    with stage.publisher((FIRST, "first")) as scheduler:
        ref = scheduler.publish("req-1", {"any group": BlockList(ids=[99])}, num_tokens=16)
        assert (ref.engine_id, ref.generation) == ("prefill-0", "g7")
        assert stage.side.page.read(stage.side.expect(worker.Publish).fence_slot) != EMPTY
        stage.side.say(worker.Released(transfer_id="req-1", why=Code.LEASE_EXPIRED))
        assert events_of(scheduler) == [Released("req-1", Code.LEASE_EXPIRED)]
    wait_until(lambda: not scheduler.is_connected, "closed")


def test_the_reference_is_there_before_the_publish(stage: Stage) -> None:
    rank = stage.rank()
    ref = rank.reference("req-1")
    assert ref == rank.publish("req-1", blocks(), num_tokens=48, nonce=ref.nonce)
    assert stage.side.expect(worker.Publish).nonce == ref.nonce
    assert rank.reference("req-2").nonce != rank.reference("req-2").nonce
    with pytest.raises(EngineError, match="nonce of 5 characters") as refused:
        rank.reference("req-2", nonce="short")
    assert refused.value.code is Code.BAD_REQUEST
    rank.close()
    with pytest.raises(KvxferdError, match="the session is over"):
        rank.reference("req-2")


# --- the fence page is the daemon's: words before, between and after its daemons


@contextmanager
def page_of(side: DaemonSide) -> Iterator[FencePage]:
    """The page that a side's movers go on serving when the side itself is gone."""
    page = FencePage(os.dup(side.page.fd))
    try:
        yield page
    finally:
        page.close()


def test_after_a_reconnect_the_old_words_are_gone_before_a_replay(stage: Stage) -> None:
    """The dead daemon's movers may serve the old page still, to readers that hold the old word."""
    rank = stage.rank()
    slot = stage.publish(rank, "t1").fence_slot
    old_word = stage.side.page.read(slot)
    with page_of(stage.side) as old:
        stage.lose(rank)
        rank.publish("t2", blocks(), num_tokens=48)
        assert old.read(slot) == old_word  # nothing is released: what reads now is right
        stage.daemon.start()
        side = stage.rejoin()
        slots = {said.transfer_id: said.fence_slot for said in (side.expect(worker.Publish) for _ in "12")}
        assert slots["t1"] == slot
        assert old.read(slot) not in (old_word, EMPTY)
        words = {side.page.read(slots[name]) for name in ("t1", "t2")}
        assert len(words) == 2
        assert not words & {old_word, EMPTY}


@pytest.mark.parametrize("why", [Code.UNPUBLISHED, Code.LEASE_EXPIRED])
def test_what_is_released_without_a_daemon_is_void_in_the_page_that_movers_serve(
    stage: Stage, why: Code
) -> None:
    rank = stage.rank()
    ref = rank.publish("t1", blocks(), num_tokens=48, lease_s=30.0 if why is Code.UNPUBLISHED else 0.3)
    slot = stage.side.expect(worker.Publish).fence_slot
    word = stage.side.page.read(slot)
    with page_of(stage.side) as page:
        stage.lose(rank)
        if why is Code.UNPUBLISHED:
            rank.unpublish(ref)
        assert one_event(rank) == Released("t1", why)
        assert page.read(slot) != word
    stage.daemon.start()
    assert stage.rejoin().is_silent()


# --- A publish carries the incarnations that its session knew when the engine called it


def tell_of(stage: Stage, session: Publisher, *ranks: tuple[Rank, str]) -> None:
    """Have the daemon tell of ranks; return once the session has heard it, by the event that follows."""
    stage.side.say(worker.EngineRanks(ranks=ranks))
    stage.side.say(worker.Released(transfer_id="another's", why=Code.COMPLETED))
    assert one_event(session) == Released("another's", Code.COMPLETED)


def test_a_held_publish_keeps_what_was_known_when_it_was_called(stage: Stage) -> None:
    scheduler, kernel = stage.publisher(*BOTH), Kernel()
    scheduler.publish("held", blocks(), num_tokens=48, after=kernel)
    tell_of(stage, scheduler, (SECOND, "b2"))
    assert dict(stage.publish(scheduler, "later").incarnations) == {FIRST: "a1", SECOND: "b2"}
    kernel.done.set()
    held = stage.side.expect(worker.Publish)
    assert (held.transfer_id, held.incarnations) == ("held", BOTH)


def test_what_is_queued_or_replayed_keeps_it_too(stage: Stage) -> None:
    scheduler = stage.publisher(*BOTH)
    stage.publish(scheduler, "before")
    stage.lose(scheduler)
    scheduler.publish("meanwhile", blocks(), num_tokens=48)
    stage.daemon.start()
    side = stage.accept()
    stage.take_publisher((FIRST, "a1"), (SECOND, "b2"))
    for name in ("before", "meanwhile"):
        replayed = side.expect(worker.Publish)
        assert (replayed.transfer_id, replayed.incarnations) == (name, BOTH)
    side.say(worker.PublishRefused(transfer_id="before", code=Code.ENGINE_INCOMPLETE, message="wait"))
    assert side.expect(worker.Publish).incarnations == BOTH  # sent again, 250 ms later
    assert dict(stage.publish(scheduler, "after").incarnations) == {FIRST: "a1", SECOND: "b2"}


def test_a_session_that_knows_no_rank_publishes_nothing(stage: Stage) -> None:
    scheduler = stage.publisher()
    with pytest.raises(EngineError, match="register its ranks first") as refused:
        scheduler.publish("t", blocks(), num_tokens=48)
    assert refused.value.code is Code.ENGINE_INCOMPLETE
    tell_of(stage, scheduler, *BOTH)
    assert stage.publish(scheduler, "t").incarnations == BOTH


def resumed(stage: Stage, rank: RankHandle) -> worker.Resume:
    rank.suspend()
    stage.side.expect(worker.Suspend)
    stage.side.say(worker.Suspended())
    events = events_of(rank)
    while events[-1] != Suspended():
        events += events_of(rank)
    resuming = stage.calling(rank.resume, {REGION: stage.memory}, WAIT_S)
    resume = stage.side.expect(worker.Resume)
    stage.side.accept_resume(resume.request, stage.new_mover())
    resuming.result(WAIT_S)
    return resume


def test_of_its_own_rank_a_session_knows_best(stage: Stage) -> None:
    rank, kernel = stage.rank(), Kernel()
    own = stage.register.incarnation
    tell_of(stage, rank, (FIRST, "nonsense"), (SECOND, "b1"))
    assert dict(stage.publish(rank, "t1").incarnations) == {FIRST: own, SECOND: "b1"}
    rank.ready("t2")
    assert stage.side.expect(worker.Ready).incarnation == own
    rank.ready("t3", after=kernel)
    resume = resumed(stage, rank)
    assert resume.incarnation != own
    kernel.done.set()
    rank.ready("t4")
    ready = stage.side.expect(worker.Ready)
    assert (ready.transfer_id, ready.incarnation) == ("t4", resume.incarnation), "t3 was written before"
    assert dict(stage.publish(rank, "t5").incarnations) == {FIRST: resume.incarnation, SECOND: "b1"}
    assert stage.side.is_silent()


def test_a_rank_that_is_refused_while_it_sleeps_keeps_nothing_to_publish_again(stage: Stage) -> None:
    rank = stage.rank()
    stage.publish(rank, "t")
    stage.mover.die()
    stage.lose(rank)
    stage.daemon.start()
    side = stage.accept()
    register = side.expect(worker.Register)
    rank.suspend()
    side.say(worker.Refused(request=register.request, code=Code.BUSY, message="later"))
    assert events_of(rank, 2) == [Released("t", Code.SUSPENDED), Suspended()]
