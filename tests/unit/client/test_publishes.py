"""The source's side: fence words, slots, readiness, releases."""

from __future__ import annotations

import json
from array import array

import numpy as np
import pytest

from kvxferd.client import BlockList, PublishRefused, RankHandle, Released, Suspended
from kvxferd.errors import BusyError, Code, EngineError, KvxferdError
from kvxferd.ids import Rank
from kvxferd.layout import unpack_ids
from kvxferd.wire import worker
from kvxferd.wire.block_id_parts import BlockIdAssembly
from kvxferd.wire.common import BlockIds
from kvxferd.wire.limits import FENCE_SLOTS, IDS_PART_BYTES
from tests.support.client_harness import REGION, Kernel, Stage, blocks, events_of, one_event
from tests.support.nodes.waiting import wait_until
from tests.support.scripted_daemon import ENDPOINT, WAIT_S


def test_the_fence_word_is_there_before_the_publish_is_sent(stage: Stage) -> None:
    rank = stage.rank()
    empty = stage.side.page.read(0)
    ref = rank.publish("req-1", blocks(4, 5, first_token=32), num_tokens=64, num_readers=2, lease_s=12.0)
    publish = stage.side.expect(worker.Publish)
    assert stage.side.page.read(publish.fence_slot) != empty
    assert (publish.transfer_id, publish.num_tokens, publish.num_readers) == ("req-1", 64, 2)
    assert list(unpack_ids(publish.blocks["full"].ids)) == [4, 5]
    assert publish.blocks["full"].first_token == 32
    assert 11.0 < publish.lease_s <= 12.0
    assert (ref.endpoint, ref.engine_id, ref.generation) == (ENDPOINT, "decode-0", "g1")
    assert ref.nonce == publish.nonce
    assert len(bytes.fromhex(ref.nonce)) == 16
    assert json.loads(ref.to_json()) == ref.to_dict()


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
    rank.pull(ref, blocks(), num_tokens=48, deadline_s=9)
    assert stage.side.expect(worker.PullRequest).ref.traceparent == traceparent
    rank.pull(ref.with_trace(others), blocks(), num_tokens=48, deadline_s=9)
    assert stage.side.expect(worker.PullRequest).ref.traceparent == others
    rank.pull(ref.with_trace("not one"), blocks(), num_tokens=48, deadline_s=9)
    assert stage.side.expect(worker.PullRequest).ref.traceparent == ""


def test_the_lease_is_the_daemons_unless_named(stage: Stage) -> None:
    rank = stage.rank(lease_s=45.0)
    rank.publish("req-1", blocks(), num_tokens=48)
    assert 44.0 < stage.side.expect(worker.Publish).lease_s <= 45.0


@pytest.mark.parametrize("says", ["released", "refused"])
def test_the_word_is_overwritten_before_the_engine_hears_that_it_is_over(stage: Stage, says: str) -> None:
    rank = stage.rank()
    rank.publish("req-1", blocks(), num_tokens=48)
    publish = stage.side.expect(worker.Publish)
    word = stage.side.page.read(publish.fence_slot)
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
        rank.publish("req-1", blocks(), num_tokens=48)  # nobody has read it: the name is free again
        assert stage.side.expect(worker.Publish).transfer_id == "req-1"
    else:
        with pytest.raises(EngineError, match="used once in a generation"):
            rank.publish("req-1", blocks(), num_tokens=48)


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
    rank.publish("one-more", one, num_tokens=16)
    assert stage.side.expect(worker.Publish).fence_slot == slots[77]


def test_a_live_transfer_id_is_taken(stage: Stage) -> None:
    rank = stage.rank()
    rank.publish("req-1", blocks(), num_tokens=48)
    with pytest.raises(EngineError, match="not released yet") as taken:
        rank.publish("req-1", blocks(), num_tokens=48)
    assert taken.value.code is Code.TRANSFER_EXISTS


def test_long_lists_travel_in_parts_before_their_publish(stage: Stage) -> None:
    rank = stage.rank()
    ids = np.arange(300_000, dtype=np.int32) % 16
    rank.publish("long", {"full": BlockList(ids=ids)}, num_tokens=300_000 * 16)
    rank.publish("short", blocks(), num_tokens=48)
    assembly, num_parts = BlockIdAssembly(), 0
    while isinstance(message := stage.side.receive()[0], BlockIds):
        assert len(message.ids) <= IDS_PART_BYTES
        assembly.add(message)
        num_parts += 1
    assert isinstance(message, worker.Publish)
    whole = assembly.complete(message.blocks, message.stream)
    assert num_parts == 3
    assert whole["full"].ids == ids.tobytes()
    assert stage.side.expect(worker.Publish).transfer_id == "short"


def test_ids_may_be_changed_once_publish_has_returned(stage: Stage) -> None:
    rank = stage.rank()
    ids = np.array([7, 8, 9], dtype=np.int32)
    rank.publish("req-1", {"full": BlockList(ids=ids)}, num_tokens=48)
    ids[:] = 0
    assert list(unpack_ids(stage.side.expect(worker.Publish).blocks["full"].ids)) == [7, 8, 9]


@pytest.mark.parametrize(
    "ids",
    [
        [1, 2],
        np.array([1, 2]),
        np.arange(8, dtype=np.int32)[::2],
        np.array([[1, 2]], dtype=np.int32),
    ],
    ids=["list", "int64", "stepped", "two dimensions"],
)
def test_what_cannot_be_lent(stage: Stage, ids: object) -> None:
    rank = stage.rank()
    with pytest.raises(EngineError) as refused:
        rank.publish("req-1", {"full": BlockList(ids=ids, borrowed=True)}, num_tokens=32)
    assert refused.value.code is Code.BLOCKS_INVALID


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
    ("ids", "words"),
    [
        (np.array([1, 2]), "format 'l'"),  # int64 would be cut
        (np.array([1.0], dtype=np.float32), "format 'f'"),
        (np.array([[1, 2]], dtype=np.int32), "2 dimensions"),
        ([1 << 40], "full"),
        (["a"], "full"),
        (b"abcd", "format 'B'"),
        (None, "full"),
    ],
)
def test_ids_that_are_refused_here(stage: Stage, ids: object, words: str) -> None:
    rank = stage.rank()
    with pytest.raises(EngineError, match=words) as refused:
        rank.publish("req-1", {"full": BlockList(ids=ids)}, num_tokens=32)
    assert refused.value.code is Code.BLOCKS_INVALID
    assert stage.side.is_silent()


def test_a_rank_hears_of_transfers_that_another_session_published(stage: Stage) -> None:
    rank = stage.rank()
    rank.ready("from-the-scheduler")
    stage.side.expect(worker.Ready)
    stage.side.say(worker.Released(transfer_id="from-the-scheduler", why=Code.COMPLETED))
    assert one_event(rank) == Released("from-the-scheduler", Code.COMPLETED)


def test_closing_overwrites_every_word_first(stage: Stage) -> None:
    rank = stage.rank()
    rank.publish("req-1", blocks(), num_tokens=48)
    publish = stage.side.expect(worker.Publish)
    word = stage.side.page.read(publish.fence_slot)
    rank.close()
    assert stage.side.page.read(publish.fence_slot) != word
    assert rank.poll() == [Released("req-1", Code.PUBLISHER_GONE)]
    assert rank.fileno() == -1


def test_a_publisher_without_memory_publishes(stage: Stage) -> None:
    with stage.publisher((Rank(0, 0), "first")) as scheduler:
        ref = scheduler.publish("req-1", {"any group": BlockList(ids=[1])}, num_tokens=16)
        assert (ref.engine_id, ref.generation) == ("prefill-0", "g7")
        stage.side.expect(worker.Publish)
        stage.side.say(worker.Released(transfer_id="req-1", why=Code.LEASE_EXPIRED))
        assert events_of(scheduler) == [Released("req-1", Code.LEASE_EXPIRED)]
    wait_until(lambda: not scheduler.is_connected, "closed")


# --- A publish carries the incarnations that its session knew when the engine called it


FIRST, SECOND = Rank(0, 0), Rank(0, 1)
BOTH = ((FIRST, "a1"), (SECOND, "b1"))


def test_a_held_publish_keeps_what_was_known_when_it_was_called(stage: Stage) -> None:
    scheduler, kernel = stage.publisher(*BOTH), Kernel()
    scheduler.publish("held", blocks(), num_tokens=48, after=kernel)
    stage.side.say(worker.EngineRanks(ranks=((SECOND, "b2"),)))
    wait_until(lambda: scheduler._session._incarnations.all != BOTH, "the report is taken")
    scheduler.publish("later", blocks(), num_tokens=48)
    later = stage.side.expect(worker.Publish)
    assert (later.transfer_id, dict(later.incarnations)) == ("later", {FIRST: "a1", SECOND: "b2"})
    kernel.done.set()
    held = stage.side.expect(worker.Publish)
    assert (held.transfer_id, held.incarnations) == ("held", BOTH)


def test_what_is_queued_or_replayed_keeps_it_too(stage: Stage) -> None:
    scheduler = stage.publisher(*BOTH)
    scheduler.publish("before", blocks(), num_tokens=48)
    stage.side.expect(worker.Publish)
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
    scheduler.publish("after", blocks(), num_tokens=48)
    assert dict(side.expect(worker.Publish).incarnations) == {FIRST: "a1", SECOND: "b2"}


def test_a_session_that_knows_no_rank_publishes_nothing(stage: Stage) -> None:
    scheduler = stage.publisher()
    with pytest.raises(EngineError, match="register its ranks first") as refused:
        scheduler.publish("t", blocks(), num_tokens=48)
    assert refused.value.code is Code.ENGINE_INCOMPLETE
    stage.side.say(worker.EngineRanks(ranks=BOTH))
    wait_until(lambda: scheduler._session._incarnations.all == BOTH, "the report is taken")
    scheduler.publish("t", blocks(), num_tokens=48)
    assert stage.side.expect(worker.Publish).incarnations == BOTH


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
    own = rank._session._incarnations.own
    stage.side.say(worker.EngineRanks(ranks=((FIRST, "nonsense"), (SECOND, "b1"))))
    wait_until(lambda: len(rank._session._incarnations.all) == 2, "the report is taken")
    rank.publish("t1", blocks(), num_tokens=48)
    assert dict(stage.side.expect(worker.Publish).incarnations) == {FIRST: own, SECOND: "b1"}
    rank.ready("t2")
    assert stage.side.expect(worker.Ready).incarnation == own
    rank.ready("t3", after=kernel)
    resume = resumed(stage, rank)
    assert resume.incarnation != own
    kernel.done.set()
    rank.ready("t4")
    ready = stage.side.expect(worker.Ready)
    assert (ready.transfer_id, ready.incarnation) == ("t4", resume.incarnation), "t3 was written before"
    rank.publish("t5", blocks(), num_tokens=48)
    published = stage.side.expect(worker.Publish)
    assert dict(published.incarnations) == {FIRST: resume.incarnation, SECOND: "b1"}
    assert stage.side.is_silent()


def test_a_rank_that_is_refused_while_it_sleeps_keeps_nothing_to_publish_again(stage: Stage) -> None:
    rank = stage.rank()
    rank.publish("t", blocks(), num_tokens=48)
    stage.side.expect(worker.Publish)
    stage.mover.die()
    stage.lose(rank)
    stage.daemon.start()
    side = stage.accept()
    register = side.expect(worker.Register)
    rank.suspend()
    side.say(worker.Refused(request=register.request, code=Code.BUSY, message="later"))
    assert events_of(rank, 2) == [Released("t", Code.SUSPENDED), Suspended()]


def test_the_reference_is_there_before_the_publish(stage: Stage) -> None:
    rank = stage.rank()
    ref = rank.reference("req-1")
    assert ref == rank.publish("req-1", blocks(), num_tokens=48, nonce=ref.nonce)
    assert stage.side.expect(worker.Publish).nonce == ref.nonce
    assert rank.reference("req-2").nonce != rank.reference("req-2").nonce
    with pytest.raises(EngineError, match="nonce of 5 characters"):
        rank.reference("req-2", nonce="short")
    rank.close()
    with pytest.raises(KvxferdError, match="the session is over"):
        rank.reference("req-2")


def test_what_is_to_be_called_at_close_is_called_once(stage: Stage) -> None:
    rank, called = stage.rank(), list[str]()
    rank.call_at_close(lambda: called.append("closed"))
    assert not called
    rank.close()
    rank.close()
    assert called == ["closed"]
