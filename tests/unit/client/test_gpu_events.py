"""Requests whose blocks kernels still use: they are held back, and never hold up the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvxferd.client import Failed, PublishRefused, RankHandle, Released
from kvxferd.errors import Code, EngineError
from kvxferd.wire import worker
from tests.support.client_harness import REF, Kernel, Stage, blocks, one_event, one_failure
from tests.support.scripted_daemon import WAIT_S


def publish(rank: RankHandle, after: Any, name: str = "req-1") -> Any:
    return rank.publish(name, blocks(), num_tokens=48, after=after)


def pull(rank: RankHandle, after: Any, deadline_s: float = WAIT_S) -> Any:
    return rank.pull(REF, blocks(), num_tokens=48, deadline_s=deadline_s, after=after)


HELD = pytest.mark.parametrize(
    ("ask", "message", "end"),
    [(publish, worker.Publish, Released), (pull, worker.PullRequest, Failed)],
    ids=["publish", "pull"],
)


@HELD
def test_a_request_goes_when_no_kernel_uses_its_blocks(
    stage: Stage, ask: Callable[..., object], message: type, end: type
) -> None:
    rank, kernel = stage.rank(), Kernel()
    ask(rank, kernel)  # a call that waited would not return
    rank.prepare(REF)
    stage.side.expect(worker.Prepare)  # and nothing before it
    kernel.still_runs()
    kernel.done.set()
    stage.side.expect(message)


@HELD
def test_closing_ends_what_is_held(
    stage: Stage, ask: Callable[..., object], message: type, end: type
) -> None:
    rank = stage.rank()
    ask(rank, Kernel())
    rank.close()
    (event,) = rank.poll()
    assert isinstance(event, end)


def test_a_pull_whose_kernel_never_ends_fails_in_time_and_safely(stage: Stage) -> None:
    rank = stage.rank()
    ticket = pull(rank, Kernel(), deadline_s=0.1)
    event = one_failure(rank)
    assert (event.ticket, event.code, event.safe_to_reuse) == (ticket, Code.DEADLINE, True)


def test_a_held_pull_is_cancelled_at_once(stage: Stage) -> None:
    rank, kernel = stage.rank(), Kernel()
    pull(rank, kernel).cancel()
    event = one_failure(rank)
    assert (event.code, event.safe_to_reuse) == (Code.CANCELLED, True)
    kernel.done.set()
    rank.ready("later")
    stage.side.expect(worker.Ready)  # and no Pull before it


def test_work_that_fails_fails_what_waits_for_it(stage: Stage) -> None:
    rank, kernel = stage.rank(), Kernel()
    publish(rank, kernel)
    kernel.error = RuntimeError("an illegal memory access was encountered")
    refused = one_event(rank)
    assert isinstance(refused, PublishRefused)
    assert (refused.transfer_id, refused.code) == ("req-1", Code.DEVICE_ERROR)
    assert "illegal memory access" in refused.message
    pull(rank, other := Kernel())
    other.error = RuntimeError("gone")
    failed = one_failure(rank)
    assert (failed.code, failed.safe_to_reuse) == (Code.DEVICE_ERROR, True)
    assert stage.side.is_silent()


def test_a_held_publish_can_be_taken_back(stage: Stage) -> None:
    """And its blocks be published under another id, while the first event is still open."""
    rank, kernel, second = stage.rank(), Kernel(), Kernel()
    rank.unpublish(publish(rank, kernel))
    assert one_event(rank) == Released("req-1", Code.UNPUBLISHED)
    with pytest.raises(EngineError, match="used once in a generation"):
        publish(rank, None)
    ref = publish(rank, second, "req-2")
    kernel.done.set()
    second.still_runs()
    second.done.set()
    assert stage.side.expect(worker.Publish).nonce == ref.nonce


def test_what_is_held_survives_a_restart_of_the_daemon(stage: Stage) -> None:
    """The replay does not tell of blocks that are still in use."""
    rank, kernel = stage.rank(), Kernel()
    ref, ticket = publish(rank, kernel), pull(rank, kernel)
    stage.publish(rank, "req-2")
    stage.side.close()
    stage.rejoin()
    assert stage.side.expect(worker.Publish).transfer_id == "req-2"
    assert stage.side.is_silent()
    kernel.done.set()
    assert stage.side.expect(worker.Publish).nonce == ref.nonce
    assert stage.side.expect(worker.PullRequest).ticket == ticket.number


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
    for ask in (publish, pull, lambda rank, after: rank.ready("req-1", after=after)):
        with pytest.raises(EngineError, match=why) as raised:
            ask(rank, after)
        assert raised.value.code is Code.BAD_REQUEST
    stage.publish(rank)  # and nothing before it
