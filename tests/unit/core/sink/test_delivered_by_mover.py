"""Movers that say Delivered to their worker themselves: the daemon is silent, and the source hears of it."""

from __future__ import annotations

import pytest

from kvxferd.errors import Code
from kvxferd.ids import Ticket
from kvxferd.wire import worker as wk
from tests.support.simulation import IDS, SINK_IDS, TOKENS, held_pull, mover_of

pytestmark = pytest.mark.parametrize("world", [True], indirect=True, ids=["by-mover"])


@pytest.mark.parametrize("said", [False, True])
def test_a_mover_that_ends_between_its_two_words(world, source, sink, said):
    """The worker has the bytes. What it says before it leaves is how the source hears."""
    mover = mover_of(sink)
    ticket = held_pull(source, sink)
    mover.hold = False
    mover.copy()
    mover.finish = lambda: None  # type: ignore[method-assign]
    assert sink.ended(ticket) is None
    if said:
        sink.say(wk.DeliveredByMover(tickets=(Ticket(ticket),)))
    sink.close()
    world.advance(1)
    assert [m.why for m in source.received(wk.Released)] == ([Code.COMPLETED] if said else [])
    world.advance(60)
    assert [m.why for m in source.received(wk.Released)] == [Code.COMPLETED if said else Code.LEASE_EXPIRED]


def test_a_noticed_pull_is_delivered_when_its_mover_dies(world, source, sink):
    mover = mover_of(sink)
    ticket = held_pull(source, sink)
    sink.say(wk.DeliveredByMover(tickets=(Ticket(ticket), Ticket(77))))
    sink.say(wk.Suspend())
    mover.die()
    assert sink.ended(ticket) is None  # it knows
    assert sink.received(wk.Suspended)
    world.advance(1)
    assert [m.why for m in source.received(wk.Released)] == [Code.COMPLETED]


def test_a_waiting_pull_is_not_believed_to_be_there(world, source, sink):
    world.hold_network = True
    ticket = sink.pull(source.publish("t1", IDS, TOKENS), SINK_IDS, TOKENS)
    sink.say(wk.DeliveredByMover(tickets=(Ticket(ticket),)))
    mover = mover_of(sink)
    mover.hold = True
    world.hold_network = False
    world.deliver()
    mover.die()
    assert sink.ended(ticket) is None  # read again, by the next mover


def test_what_the_engine_was_told_has_failed_is_not_acknowledged(world, source, sink):
    ticket = held_pull(source, sink, deadline_s=3)
    world.advance(3.1)
    assert isinstance(sink.ended(ticket), wk.TicketFailed)
    sink.say(wk.DeliveredByMover(tickets=(Ticket(ticket),)))
    sink.close()
    world.advance(60)
    assert [m.why for m in source.received(wk.Released)] == [Code.LEASE_EXPIRED]
