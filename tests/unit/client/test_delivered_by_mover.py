"""What a mover says to the client itself, before, after and without its daemon."""

from __future__ import annotations

import pytest

from kvxferd.client import Delivered, Failed, PullTicket, Quiesced, Suspended
from kvxferd.errors import Code
from kvxferd.ids import Ticket
from kvxferd.wire import worker
from kvxferd.wire.codec import encode
from kvxferd.wire.limits import MAX_DELIVERY_BYTES
from tests.support.client_harness import Stage, delivered, events_of, one_event, one_failure
from tests.support.nodes.waiting import wait_until


def word_of(ticket: PullTicket) -> bytes:
    return encode(delivered(ticket))


def test_a_notice_counts_before_the_daemons_end(stage: Stage) -> None:
    rank = stage.rank()
    told, untold = stage.pull(rank), stage.pull(rank)
    stage.side.deliver(word_of(told))
    stage.daemon.stop()
    stage.mover.die()
    first, second = events_of(rank, 2)
    assert first == Delivered(told, 3, 2, 0.5)
    assert isinstance(second, Failed)
    assert second.ticket == untold


def test_a_mover_that_outlives_its_daemon_is_believed(stage: Stage) -> None:
    rank = stage.rank()
    ticket = stage.pull(rank)
    side, kept = stage.side, list(stage.side.fds)
    side.fds.clear()  # the mover's, too
    stage.daemon.stop()
    wait_until(lambda: not rank.is_connected, "loss noticed")
    side.fds = kept
    side.deliver(word_of(ticket))
    stage.mover.die()
    assert one_event(rank) == Delivered(ticket, 3, 2, 0.5)
    side.close()


def test_a_notice_counts_before_the_deadline(stage: Stage) -> None:
    rank = stage.rank()
    told, untold = (stage.pull(rank, deadline_s=0.3) for _ in range(2))
    stage.side.deliver(word_of(told))
    assert stage.side.expect(worker.Cancel).ticket == untold.number  # both are due now
    first, second = events_of(rank, 2)
    assert first == Delivered(told, 3, 2, 0.5)
    assert isinstance(second, Failed)


def test_a_notice_after_a_failure_in_doubt_gives_the_blocks_back_and_is_no_last_word(stage: Stage) -> None:
    rank = stage.rank()
    ticket = stage.pull(rank)
    stage.fail(ticket, is_safe=False)
    one_failure(rank)
    stage.side.deliver(word_of(ticket))
    assert isinstance(one_event(rank), Quiesced)
    rank.close()
    with pytest.raises(ConnectionError):
        stage.side.receive()


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
    stage.pull(rank)
    stage.side.deliver(raw)
    rank.poll()
    with pytest.raises(ConnectionError):
        stage.side.receive()
    stage.mover.die()
    one_failure(rank)


def test_the_daemon_hears_of_them_before_suspend(stage: Stage) -> None:
    rank = stage.rank()
    ticket = stage.pull(rank)
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
    told, unread = stage.pull(rank), stage.pull(rank)
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
    given_up = stage.pull(rank, deadline_s=0.01)
    one_failure(rank)
    stage.side.expect(worker.Cancel)
    arrived, open_, failed = (stage.pull(rank) for _ in range(3))
    stage.fail(failed, is_safe=True, code=Code.CANCELLED)
    stage.side.deliver(word_of(arrived))
    tickets = tuple(ticket.number for ticket in (given_up, arrived, open_, failed))
    stage.side.say(worker.PullsInterrupted(number=3, tickets=tickets))
    resumed = stage.side.expect(worker.PullsResumed)
    assert resumed == worker.PullsResumed(number=3, tickets=(open_.number,), arrived=(arrived.number,))
    stage.side.deliver(word_of(open_))  # by the next mover
    assert len(events_of(rank, 3)) == 3
