"""A mover has the memory only once the client watches it: so no mover that still writes is unknown."""

from __future__ import annotations

import pytest

from kvxferd.client import PullTicket, RankHandle, Suspended
from kvxferd.errors import Code, KvxferdError
from kvxferd.wire import worker
from tests.support.client_harness import LAYOUT, REF, REGION, SPEC, Stage, blocks, one_event, one_failure
from tests.support.scripted_daemon import WAIT_S


def pulled(stage: Stage, rank: RankHandle, deadline_s: float = 10.0) -> PullTicket:
    """A pull that its daemon has."""
    ticket = rank.pull(REF, blocks(), num_tokens=48, deadline_s=deadline_s)
    assert stage.side.expect(worker.Pull).ticket == ticket.number
    return ticket


def test_the_pidfd_comes_with_the_offer_and_with_nothing_else(stage: Stage) -> None:
    rank = stage.rank()
    assert rank.is_connected
    stage.side.offer(stage.new_mover())
    stage.side.say(worker.MoverChanged())
    rank.prepare(REF)
    stage.side.expect(worker.Prepare)


def test_a_mover_that_was_acknowledged_must_be_dead_too(stage: Stage) -> None:
    rank = stage.rank()
    first = stage.mover
    pulled(stage, rank)
    stage.side.offer(stage.new_mover())  # nobody has told of a change yet
    first.die()
    stage.lose(rank)
    assert rank.poll() == []
    stage.mover.die()
    event = one_failure(rank)
    assert event.safe_to_reuse


def test_a_publisher_is_offered_nothing(stage: Stage) -> None:
    stage.publisher()
    stage.side.say(worker.MoverOffered(number=1), stage.new_mover().pidfd)
    with pytest.raises(ConnectionError):
        stage.side.receive()


def test_memory_that_no_mover_was_offered_for_is_let_go_at_once(stage: Stage) -> None:
    rank = stage.rank()
    stage.daemon.stop()
    stage.mover.die()
    stage.daemon.start()
    side = stage.accept()
    side.expect(worker.Register)  # the memory is offered
    rank.suspend()
    stage.daemon.stop()
    assert one_event(rank) == Suspended()


def test_a_refusal_after_the_offer_leaves_nothing_mapped(stage: Stage) -> None:
    client = stage.client()
    registering = stage.calling(client.register, SPEC, LAYOUT, {REGION: stage.memory}, WAIT_S)
    register = stage.side.expect(worker.Register)
    stage.side.offer(stage.new_mover())
    stage.side.say(worker.Refused(request=register.request, code=Code.REGION_UNSEALED, message="seal it"))
    with pytest.raises(KvxferdError, match="seal it"):
        registering.result(WAIT_S)
