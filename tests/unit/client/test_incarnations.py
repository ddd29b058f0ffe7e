"""A publish carries the incarnations that its session knew when the engine called it."""

from __future__ import annotations

import pytest

from kvxferd.client import RankHandle, Released, Suspended
from kvxferd.errors import Code, EngineError
from kvxferd.ids import Rank
from kvxferd.wire import worker
from tests.support.client_harness import REGION, Kernel, Stage, blocks, events_of
from tests.support.scripted_daemon import WAIT_S, until

FIRST, SECOND = Rank(0, 0), Rank(0, 1)
BOTH = ((FIRST, "a1"), (SECOND, "b1"))


def test_a_held_publish_keeps_what_was_known_when_it_was_called(stage: Stage) -> None:
    scheduler, kernel = stage.publisher(*BOTH), Kernel()
    scheduler.publish("held", blocks(), num_tokens=48, after=kernel)
    stage.side.say(worker.EngineRanks(ranks=((SECOND, "b2"),)))
    until(lambda: scheduler._session._incarnations.all != BOTH, "the report is taken")
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
    until(lambda: scheduler._session._incarnations.all == BOTH, "the report is taken")
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
    until(lambda: len(rank._session._incarnations.all) == 2, "the report is taken")
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
