"""Sleep mode: memory goes only after Suspended, and comes back in a new mapping."""

from __future__ import annotations

import os

import pytest

from kvxferd.client import Failed, RankHandle, Released, Suspended
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.memory import SealedMemory
from kvxferd.wire import worker
from tests.support.client_harness import REF, REGION, SIZE, Stage, blocks, events_of, one_event
from tests.support.scripted_daemon import WAIT_S


def suspended(stage: Stage) -> RankHandle:
    """A rank whose memory is out."""
    rank = stage.rank()
    rank.suspend()
    stage.side.expect(worker.Suspend)
    stage.side.say(worker.Suspended())
    assert one_event(rank) == Suspended()
    return rank


def test_suspend_ends_publishes_and_says_when_the_memory_may_go(stage: Stage) -> None:
    rank = stage.rank()
    rank.publish("req-1", blocks(), num_tokens=48)
    stage.side.expect(worker.Publish)
    rank.suspend()
    rank.suspend()  # again: nothing more
    stage.side.expect(worker.Suspend)
    assert rank.poll() == []
    assert rank.memory_in_use
    stage.side.say(worker.Released(transfer_id="req-1", why=Code.SUSPENDED))
    stage.side.say(worker.Suspended())
    assert events_of(rank, 2) == [Released("req-1", Code.SUSPENDED), Suspended()]
    assert not rank.memory_in_use


def test_a_suspended_rank_takes_no_requests(stage: Stage) -> None:
    rank = suspended(stage)
    with pytest.raises(EngineError, match="resume it first") as refused:
        rank.publish("req-1", blocks(), num_tokens=48)
    assert refused.value.code is Code.SUSPENDED
    with pytest.raises(EngineError, match="resume it first"):
        rank.pull(REF, blocks(), num_tokens=48, deadline_s=9.0)
    assert stage.side.is_silent()


def test_a_suspended_rank_keeps_no_memory_alive(stage: Stage) -> None:
    inode = os.fstat(stage.memory.fd).st_ino
    before = _own_fds(inode)
    rank = stage.rank()
    assert _own_fds(inode) == before + 2  # what would be registered again, and what the daemon got
    rank.suspend()
    stage.side.expect(worker.Suspend)
    stage.side.say(worker.Suspended())
    one_event(rank)
    stage.side.close()
    assert _own_fds(inode) == before


def _own_fds(inode: int) -> int:
    """How many descriptors of this process are that file."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.fstat(int(name)).st_ino == inode
        except OSError:
            continue  # the folder's own
    return count


def test_resume_sends_the_new_memory(stage: Stage) -> None:
    rank = suspended(stage)
    new = SealedMemory.create(SIZE)
    resuming = stage.calling(rank.resume, {REGION: new}, WAIT_S)
    resume, fds = stage.side.receive()
    assert isinstance(resume, worker.Resume)
    assert os.fstat(fds[0]).st_ino == os.fstat(new.fd).st_ino
    stage.side.accept_resume(resume.request, stage.new_mover())
    resuming.result(WAIT_S)
    rank.pull(REF, blocks(), num_tokens=48, deadline_s=9.0)
    stage.side.expect(worker.Pull)
    new.close()


def test_a_refused_resume_leaves_the_rank_suspended(stage: Stage) -> None:
    rank = suspended(stage)
    resuming = stage.calling(rank.resume, {REGION: stage.memory}, WAIT_S)
    resume = stage.side.expect(worker.Resume)
    stage.side.say(worker.Refused(request=resume.request, code=Code.REGION_UNSEALED, message="seal it"))
    with pytest.raises(EngineError, match="seal it"):
        resuming.result(WAIT_S)
    with pytest.raises(EngineError, match="resume it first"):
        rank.publish("req-1", blocks(), num_tokens=48)
    again = stage.calling(rank.resume, {REGION: stage.memory}, WAIT_S)
    resume = stage.side.expect(worker.Resume)
    stage.side.accept_resume(resume.request, stage.new_mover())
    again.result(WAIT_S)


def test_resume_before_suspended_is_refused(stage: Stage) -> None:
    rank = stage.rank()
    rank.suspend()
    with pytest.raises(EngineError, match="before its Suspended") as refused:
        rank.resume({REGION: stage.memory})
    assert refused.value.code is Code.OUT_OF_PLACE


def test_a_resume_that_times_out_goes_on(stage: Stage) -> None:
    rank = suspended(stage)
    with pytest.raises(KvxferdError, match="has not answered") as late:
        rank.resume({REGION: stage.memory}, 0.1)
    assert late.value.code is Code.DEADLINE
    rank.pull(REF, blocks(), num_tokens=48, deadline_s=9.0)
    resume = stage.side.expect(worker.Resume)
    stage.side.accept_resume(resume.request, stage.new_mover())
    stage.side.expect(worker.Pull)


def test_pulls_that_no_daemon_heard_of_fail_safely(stage: Stage) -> None:
    rank = stage.rank()
    stage.lose(rank)
    ticket = rank.pull(REF, blocks(), num_tokens=48, deadline_s=30.0)
    rank.suspend()
    event = events_of(rank)[0]
    assert isinstance(event, Failed)
    assert (event.ticket, event.code, event.safe_to_reuse) == (ticket, Code.SUSPENDED, True)


@pytest.mark.parametrize("asked", ["before", "after"])
def test_a_dead_mover_is_as_good_as_the_daemons_word(stage: Stage, asked: str) -> None:
    rank = stage.rank()
    rank.publish("req-1", blocks(), num_tokens=48)
    stage.side.expect(worker.Publish)
    if asked == "before":
        rank.suspend()
        stage.side.expect(worker.Suspend)
    stage.lose(rank)
    if asked == "after":
        rank.suspend()
    assert one_event(rank) == Released("req-1", Code.SUSPENDED)
    assert rank.poll() == []
    stage.mover.die()
    assert one_event(rank) == Suspended()
    stage.daemon.start()
    side = stage.accept()
    assert side.is_silent()  # a suspended rank has nothing to register
    resuming = stage.calling(rank.resume, {REGION: stage.memory}, WAIT_S)
    side.register(stage.new_mover())
    resuming.result(WAIT_S)
