"""A mover has the memory only once the client watches it: so no mover that still writes is unknown."""

from __future__ import annotations

import pytest

from kvxferd.client import Failed, PullTicket, Quiesced, RankHandle, Suspended
from kvxferd.errors import Code, KvxferdError
from kvxferd.wire import worker
from tests.support.client_harness import LAYOUT, REF, REGION, SPEC, Stage, blocks, one_event
from tests.support.scripted_daemon import WAIT_S, until


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
    stage.daemon.stop()
    until(lambda: not rank.is_connected, "loss noticed")
    assert rank.poll() == []
    stage.mover.die()
    event = one_event(rank)
    assert isinstance(event, Failed)
    assert event.safe_to_reuse


def test_an_acknowledged_mover_that_lives_on_leaves_doubt(stage: Stage) -> None:
    rank = stage.rank()
    first = stage.mover
    pulled(stage, rank)
    stage.side.offer(stage.new_mover())
    first.die()
    stage.daemon.stop()
    event = one_event(rank)
    assert isinstance(event, Failed)
    assert not event.safe_to_reuse
    stage.mover.die()
    assert isinstance(one_event(rank), Quiesced)


def test_what_cannot_be_watched_is_not_acknowledged(stage: Stage) -> None:
    rank = stage.rank()
    stage.side.say(worker.MoverOffered(number=2), stage.memory.fd)  # a file is always readable
    with pytest.raises(ConnectionError):
        stage.side.receive()
    stage.rejoin()
    until(lambda: rank.is_connected, "back")


@pytest.mark.parametrize("num_fds", [0, 2])
def test_an_offer_carries_one_descriptor(stage: Stage, num_fds: int) -> None:
    rank = stage.rank()
    stage.side.say(worker.MoverOffered(number=2), *[stage.new_mover().pidfd] * num_fds)
    with pytest.raises(ConnectionError):
        stage.side.receive()
    stage.rejoin()
    until(lambda: rank.is_connected, "back")


def test_a_publisher_is_offered_nothing(stage: Stage) -> None:
    client = stage.client()
    attaching = stage.calling(client.attach, "decode-0", "g1", WAIT_S)
    attach = stage.side.expect(worker.Attach)
    stage.side.say_registered(attach.request)
    attaching.result(WAIT_S)
    stage.side.say(worker.MoverOffered(number=1), stage.new_mover().pidfd)
    with pytest.raises(ConnectionError):
        stage.side.receive()


def test_memory_that_no_mover_was_offered_for_is_let_go_at_once(stage: Stage) -> None:
    rank = stage.rank()
    stage.daemon.stop()
    stage.mover.die()
    stage.daemon.start()
    side = stage.daemon.accept()
    side.greet()
    side.expect(worker.Register)  # the memory is offered
    rank.suspend()
    stage.daemon.stop()
    assert one_event(rank) == Suspended()


def test_memory_that_a_watched_mover_may_have_is_let_go_when_that_is_dead(stage: Stage) -> None:
    rank = stage.rank()
    stage.daemon.stop()
    stage.mover.die()
    stage.daemon.start()
    side = stage.daemon.accept()
    side.greet()
    side.expect(worker.Register)
    side.offer(stage.new_mover())
    rank.suspend()
    stage.daemon.stop()
    until(lambda: not rank.is_connected, "loss noticed")
    assert rank.poll() == []
    stage.mover.die()
    assert one_event(rank) == Suspended()


def test_a_refusal_after_the_offer_leaves_nothing_mapped(stage: Stage) -> None:
    client = stage.client()
    registering = stage.calling(client.register, SPEC, LAYOUT, {REGION: stage.memory}, WAIT_S)
    register = stage.side.expect(worker.Register)
    stage.side.offer(stage.new_mover())
    stage.side.say(worker.Refused(request=register.request, code=Code.REGION_UNSEALED, message="seal it"))
    with pytest.raises(KvxferdError, match="seal it"):
        registering.result(WAIT_S)
