"""Sleep mode: memory goes only after Suspended, and comes back in a new mapping."""

from __future__ import annotations

import os
from concurrent.futures import Future
from contextlib import suppress

import pytest

from kvxferd.client import RankHandle, Released, Suspended
from kvxferd.errors import Code, EngineError, KvxferdError
from kvxferd.wire import worker
from tests.support.client_harness import REF, REGION, Stage, blocks, events_of, one_event, one_failure
from tests.support.scripted_daemon import WAIT_S


def suspended(stage: Stage) -> RankHandle:
    """A rank whose memory is out."""
    rank = stage.rank()
    rank.suspend()
    stage.side.expect(worker.Suspend)
    stage.side.say(worker.Suspended())
    assert one_event(rank) == Suspended()
    return rank


def resuming(stage: Stage, rank: RankHandle) -> Future[None]:
    return stage.calling(rank.resume, {REGION: stage.memory}, WAIT_S)


def accept_resume(stage: Stage) -> None:
    stage.side.accept_resume(stage.side.expect(worker.Resume).request, stage.new_mover())


def test_suspend_ends_publishes_and_says_when_the_memory_may_go(stage: Stage) -> None:
    rank = stage.rank()
    stage.publish(rank)
    rank.suspend()
    rank.suspend()  # again: nothing more
    stage.side.expect(worker.Suspend)
    assert rank.poll() == []
    assert rank.memory_in_use
    stage.side.say(worker.Released(transfer_id="req-1", why=Code.SUSPENDED))
    stage.side.say(worker.Suspended())
    assert events_of(rank, 2) == [Released("req-1", Code.SUSPENDED), Suspended()]
    assert not rank.memory_in_use


def test_a_suspended_rank_keeps_no_memory_alive(stage: Stage) -> None:
    inode = os.fstat(stage.memory.fd).st_ino
    before = _own_fds(inode)
    suspended(stage)
    stage.side.close()
    assert _own_fds(inode) == before > 0


def _own_fds(inode: int) -> int:
    """How many descriptors of this process are that file."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder's own
            count += os.fstat(int(name)).st_ino == inode
    return count


def test_a_refused_resume_leaves_the_rank_suspended_and_it_takes_no_requests(stage: Stage) -> None:
    rank = suspended(stage)
    refused = resuming(stage, rank)
    request = stage.side.expect(worker.Resume).request
    stage.side.say(worker.Refused(request=request, code=Code.REGION_UNSEALED, message="seal it"))
    with pytest.raises(EngineError, match="seal it"):
        refused.result(WAIT_S)
    with pytest.raises(EngineError, match="resume it first") as not_now:
        rank.publish("req-1", blocks(), num_tokens=48)
    assert not_now.value.code is Code.SUSPENDED
    with pytest.raises(EngineError, match="resume it first"):
        rank.pull(REF, blocks(), num_tokens=48, deadline_s=9.0)
    assert stage.side.is_silent()
    again = resuming(stage, rank)
    accept_resume(stage)
    again.result(WAIT_S)


def test_a_resume_that_times_out_goes_on(stage: Stage) -> None:
    rank = suspended(stage)
    with pytest.raises(KvxferdError, match="has not answered") as late:
        rank.resume({REGION: stage.memory}, 0.1)
    assert late.value.code is Code.DEADLINE
    rank.pull(REF, blocks(), num_tokens=48, deadline_s=9.0)
    accept_resume(stage)
    stage.side.expect(worker.PullRequest)


def test_pulls_that_no_daemon_heard_of_fail_safely(stage: Stage) -> None:
    rank = stage.rank()
    stage.lose(rank)
    ticket = rank.pull(REF, blocks(), num_tokens=48, deadline_s=30.0)
    rank.suspend()
    event = one_failure(rank)
    assert (event.ticket, event.code, event.safe_to_reuse) == (ticket, Code.SUSPENDED, True)


@pytest.mark.parametrize("asked", ["before", "after"])
def test_a_dead_mover_is_as_good_as_the_daemons_word(stage: Stage, asked: str) -> None:
    rank = stage.rank()
    stage.publish(rank)
    if asked == "before":
        rank.suspend()
        stage.side.expect(worker.Suspend)
    stage.lose(rank)
    if asked == "after":
        rank.suspend()
    assert rank.poll() == []
    stage.mover.die()
    assert events_of(rank, 2) == [Released("req-1", Code.SUSPENDED), Suspended()]
    stage.daemon.start()
    side = stage.accept()
    assert side.is_silent()  # a suspended rank has nothing to register
    again = resuming(stage, rank)
    side.register(stage.new_mover())
    again.result(WAIT_S)
