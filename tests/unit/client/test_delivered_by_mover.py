"""What a mover says to the client itself, before, after and without its daemon."""

from __future__ import annotations

import time

import pytest

from kvxferd.client import Delivered, Failed, PullTicket, RankHandle, Suspended
from kvxferd.client.pulls import DEADLINE_GRACE_S
from kvxferd.errors import Code
from kvxferd.ids import Ticket
from kvxferd.wire import worker
from kvxferd.wire.codec import encode
from kvxferd.wire.limits import MAX_DELIVERY_BYTES
from tests.support.client_harness import Stage, events_of, one_event, one_failure, pulled


def noticed_in_doubt(stage: Stage, rank: RankHandle) -> None:
    """A pull that has failed in doubt, and then its mover's word."""
    ticket = pulled(stage, rank)
    failed = worker.TicketFailed(
        ticket=ticket.number, code=Code.DEADLINE, message="late", safe_to_reuse=False
    )
    stage.side.say(failed)
    one_failure(rank)
    stage.side.deliver(word_of(ticket))


def word_of(ticket: PullTicket) -> bytes:
    return encode(worker.TicketDelivered(ticket=ticket.number, bytes=3, runs=2, wire_s=0.5))


def test_a_notice_counts_before_the_daemons_end(stage: Stage) -> None:
    rank = stage.rank()
    told, untold = pulled(stage, rank), pulled(stage, rank)
    stage.side.deliver(word_of(told))
    stage.daemon.stop()
    stage.mover.die()
    delivered, failed = events_of(rank, 2)
    assert delivered == Delivered(told, 3, 2, 0.5)
    assert isinstance(failed, Failed)
    assert failed.ticket == untold


def test_a_mover_that_outlives_its_daemon_is_believed(stage: Stage) -> None:
    rank = stage.rank()
    ticket = pulled(stage, rank)
    side, stage.side.fds = stage.side, list(stage.side.fds)
    fds, side.fds = side.fds, []
    stage.daemon.stop()
    deadline = time.monotonic() + 10.0
    while rank.is_connected:
        assert time.monotonic() < deadline
    side.fds = fds
    side.deliver(word_of(ticket))
    stage.mover.die()
    assert one_event(rank) == Delivered(ticket, 3, 2, 0.5)
    side.close()


def test_one_that_failed_in_doubt_is_not_among_the_last_words(stage: Stage) -> None:
    rank = stage.rank()
    noticed_in_doubt(stage, rank)
    assert len(rank.poll()) == 1
    rank.close()
    with pytest.raises(ConnectionError):
        stage.side.receive()


def test_a_notice_counts_before_the_deadline(stage: Stage) -> None:
    rank = stage.rank()
    ticket = pulled(stage, rank, deadline_s=0.05)
    stage.side.deliver(word_of(ticket))
    # No event tells when the client's own timer is due too: by the notice its descriptor is readable already.
    time.sleep(0.05 + DEADLINE_GRACE_S + 0.25)
    assert rank.poll() == [Delivered(ticket, 3, 2, 0.5)]


def test_a_notice_after_a_failure_in_doubt_gives_the_blocks_back(stage: Stage) -> None:
    rank = stage.rank()
    noticed_in_doubt(stage, rank)
    assert type(one_event(rank)).__name__ == "Quiesced"


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense",
        b"",
        encode(worker.Suspended()),
        bytes(MAX_DELIVERY_BYTES + 1),
        encode(worker.TicketDelivered(ticket=Ticket(99), bytes=0, runs=0, wire_s=0.0)),  # never requested
    ],
)
def test_nonsense_ends_the_connection(stage: Stage, raw: bytes) -> None:
    rank = stage.rank()
    pulled(stage, rank)
    stage.side.deliver(raw)
    rank.poll()
    with pytest.raises(ConnectionError):
        stage.side.receive()
    stage.mover.die()
    one_failure(rank)


def test_the_daemon_hears_of_them_before_suspend(stage: Stage) -> None:
    rank = stage.rank()
    ticket = pulled(stage, rank)
    stage.side.deliver(word_of(ticket))
    assert isinstance(one_event(rank), Delivered)
    rank.suspend()
    assert stage.side.expect(worker.DeliveredByMover).tickets == (ticket.number,)
    stage.side.expect(worker.Suspend)
    stage.mover.die()
    stage.side.say(worker.Suspended())
    assert one_event(rank) == Suspended()


def test_the_daemon_hears_of_them_before_the_end(stage: Stage) -> None:
    rank = stage.rank()
    told, unread = pulled(stage, rank), pulled(stage, rank)
    stage.side.deliver(word_of(told))
    assert isinstance(one_event(rank), Delivered)
    stage.side.deliver(word_of(unread))
    rank.close()
    assert stage.side.expect(worker.DeliveredByMover).tickets == (told.number, unread.number)
    with pytest.raises(ConnectionError):
        stage.side.receive()
    assert rank.poll() == [Delivered(unread, 3, 2, 0.5)]
    assert rank.fileno() == -1


def test_of_pulls_whose_mover_died_the_client_says_which_have_not_ended(stage: Stage) -> None:
    rank = stage.rank()
    delivered, open_, cancelled = (pulled(stage, rank) for _ in range(3))
    failed = worker.TicketFailed(
        ticket=cancelled.number, code=Code.CANCELLED, message="no", safe_to_reuse=True
    )
    stage.side.say(failed)
    stage.side.deliver(word_of(delivered))
    tickets = (delivered.number, open_.number, cancelled.number)
    stage.side.say(worker.PullsInterrupted(number=3, tickets=tickets))
    resumed = stage.side.expect(worker.PullsResumed)
    assert resumed == worker.PullsResumed(number=3, tickets=(open_.number,), arrived=(delivered.number,))
    stage.side.deliver(word_of(open_))  # by the next mover
    assert len(events_of(rank, 3)) == 3


def test_a_pull_that_the_client_has_given_up_is_not_read_again(stage: Stage) -> None:
    rank = stage.rank()
    ticket = pulled(stage, rank, deadline_s=0.01)
    one_failure(rank)
    stage.side.expect(worker.Cancel)
    stage.side.say(worker.PullsInterrupted(number=3, tickets=(ticket.number,)))
    assert stage.side.expect(worker.PullsResumed) == worker.PullsResumed(number=3, tickets=())


def test_a_pull_that_was_never_asked_cannot_be_interrupted(stage: Stage) -> None:
    rank = stage.rank()
    stage.side.say(worker.PullsInterrupted(number=3, tickets=(7,)))
    with pytest.raises(ConnectionError):
        stage.side.receive()
    rank.close()
