"""Requests whose blocks kernels still use: they are held back, and never hold up the engine."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvxferd.client import Failed, PublishRefused, Released
from kvxferd.errors import Code, EngineError
from kvxferd.wire import worker
from tests.support.client_harness import REF, Kernel, Stage, blocks, one_event, one_failure
from tests.support.scripted_daemon import WAIT_S


def test_a_publish_goes_when_its_blocks_are_written(stage: Stage) -> None:
    rank, kernel = stage.rank(), Kernel()
    ref = rank.publish("req-1", blocks(), num_tokens=48, after=kernel)  # a call that waited would not return
    rank.ready("req-2")
    assert stage.side.expect(worker.Ready).transfer_id == "req-2", "the publish was held back"
    kernel.still_runs()
    kernel.done.set()
    publish = stage.side.expect(worker.Publish)
    assert (publish.transfer_id, publish.nonce) == ("req-1", ref.nonce)


def test_a_pull_goes_when_nobody_uses_its_blocks(stage: Stage) -> None:
    rank, kernel = stage.rank(), Kernel()
    ticket = rank.pull(REF, blocks(), num_tokens=48, deadline_s=WAIT_S, after=kernel)
    rank.prepare(REF)
    stage.side.expect(worker.Prepare)
    kernel.still_runs()
    kernel.done.set()
    assert stage.side.expect(worker.PullRequest).ticket == ticket.number


def test_a_pull_whose_kernel_never_ends_fails_in_time_and_safely(stage: Stage) -> None:
    rank = stage.rank()
    ticket = rank.pull(REF, blocks(), num_tokens=48, deadline_s=0.1, after=Kernel())
    event = one_failure(rank)
    assert (event.ticket, event.code, event.safe_to_reuse) == (ticket, Code.DEADLINE, True)


def test_a_held_pull_is_cancelled_at_once(stage: Stage) -> None:
    rank, kernel = stage.rank(), Kernel()
    ticket = rank.pull(REF, blocks(), num_tokens=48, deadline_s=WAIT_S, after=kernel)
    ticket.cancel()
    event = one_failure(rank)
    assert (event.code, event.safe_to_reuse) == (Code.CANCELLED, True)
    kernel.done.set()
    rank.ready("later")
    stage.side.expect(worker.Ready)  # and no Pull before it


def test_work_that_fails_fails_what_waits_for_it(stage: Stage) -> None:
    rank, kernel = stage.rank(), Kernel()
    rank.publish("req-1", blocks(), num_tokens=48, after=kernel)
    kernel.error = RuntimeError("an illegal memory access was encountered")
    refused = one_event(rank)
    assert isinstance(refused, PublishRefused)
    assert (refused.transfer_id, refused.code) == ("req-1", Code.DEVICE_ERROR)
    assert "illegal memory access" in refused.message
    other = Kernel()
    rank.pull(REF, blocks(), num_tokens=48, deadline_s=WAIT_S, after=other)
    other.error = RuntimeError("gone")
    failed = one_event(rank)
    assert isinstance(failed, Failed)
    assert (failed.code, failed.safe_to_reuse) == (Code.DEVICE_ERROR, True)
    assert stage.side.is_silent()


def test_a_held_publish_can_be_taken_back(stage: Stage) -> None:
    """And its blocks be published under another id, while the first event is still open."""
    rank, kernel, second = stage.rank(), Kernel(), Kernel()
    rank.unpublish(rank.publish("req-1", blocks(), num_tokens=48, after=kernel))
    assert one_event(rank) == Released("req-1", Code.UNPUBLISHED)
    with pytest.raises(EngineError, match="used once in a generation"):
        rank.publish("req-1", blocks(7), num_tokens=16)
    ref = rank.publish("req-2", blocks(7), num_tokens=16, after=second)
    kernel.done.set()
    second.still_runs()
    second.done.set()
    assert stage.side.expect(worker.Publish).nonce == ref.nonce


def test_what_is_held_survives_a_restart_of_the_daemon(stage: Stage) -> None:
    """The replay does not tell of blocks that are still being written."""
    rank, kernel = stage.rank(), Kernel()
    ref = rank.publish("req-1", blocks(), num_tokens=48, after=kernel)
    rank.publish("req-2", blocks(5), num_tokens=16)
    stage.side.expect(worker.Publish)
    stage.side.close()
    stage.rejoin()
    assert stage.side.expect(worker.Publish).transfer_id == "req-2"
    kernel.done.set()
    assert stage.side.expect(worker.Publish).nonce == ref.nonce


@pytest.mark.parametrize("what", ["publish", "pull"])
def test_closing_ends_what_is_held(stage: Stage, what: str) -> None:
    rank, kernel = stage.rank(), Kernel()
    if what == "publish":
        rank.publish("req-1", blocks(), num_tokens=48, after=kernel)
    else:
        rank.pull(REF, blocks(), num_tokens=48, deadline_s=WAIT_S, after=kernel)
    rank.close()
    (event,) = rank.poll()
    assert isinstance(event, Released if what == "publish" else Failed)


class Unrecorded(Kernel):
    """What `torch.cuda.Event()` is before its `record`: nothing, and it calls that done."""

    cuda_event = 0

    def query(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("after", "why"), [(Unrecorded(), "never recorded"), (threading.Event(), "no query"), (7, "no query")]
)
def test_what_cannot_be_waited_for_is_refused_before_anything_moves(
    stage: Stage, after: Any, why: str
) -> None:
    rank = stage.rank()
    for send_request in (
        lambda: rank.publish("req-1", blocks(), num_tokens=48, after=after),
        lambda: rank.ready("req-1", after=after),
        lambda: rank.pull(REF, blocks(), num_tokens=48, deadline_s=WAIT_S, after=after),
    ):
        with pytest.raises(EngineError, match=why) as raised:
            send_request()
        assert raised.value.code is Code.BAD_REQUEST
    rank.publish("req-1", blocks(), num_tokens=48)
    assert stage.side.expect(worker.Publish).transfer_id == "req-1", "and nothing before it"
