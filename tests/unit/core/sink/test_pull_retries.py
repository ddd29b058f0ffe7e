"""A transport failure is read once more, on a new grant and a new connection, before anybody hears of it."""

from __future__ import annotations

from kvxferd.core.sink.pulls import RETRY_WITHIN_S
from kvxferd.errors import Code
from kvxferd.records import PullRecord
from kvxferd.wire import mover as mv
from kvxferd.wire import worker as wk
from tests.support.simulation import IDS, SINK_IDS, TOKENS, mover_of

DELIVERED_BOTH_WAYS = True


def fail(worker, **outcome):
    """The mover says that its oldest pull failed in the transport."""
    mover = mover_of(worker)
    start = mover.started.popleft()
    agent = start.sources[0].agent
    known = {"delivered": False, "code": Code.TRANSPORT, "message": "lost", "agent": agent}
    mover.say(mv.PullDone(pull=start.pull, outcome=mv.PullOutcome(**known | outcome)))


def records(sink):
    return [r for r in sink.host.records if isinstance(r, PullRecord)]


def test_a_source_whose_mover_was_replaced_is_read_through_the_new_one(world, source, sink):
    mover_of(sink).hold = True
    ticket = sink.pull(source.publish("t1", IDS, TOKENS), SINK_IDS, TOKENS)
    mover_of(source).die()
    world.advance(1)  # another mover is bound
    mover_of(sink).hold = False
    mover_of(sink).copy()  # from an agent that is gone
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)
    assert sink.num_wrong(SINK_IDS, TOKENS, seed=1) == 0
    assert [m.why for m in source.received(wk.Released)] == [Code.COMPLETED]
    assert [r.retried for r in records(sink)] == [True]
    assert not any(sink.host.node.grant_client.num_grants().values())


def test_a_retry_that_has_its_grant_takes_as_long_as_its_pull_has(world, source, sink):
    mover_of(sink).hold = True
    ticket = sink.pull(source.publish("t1", IDS, TOKENS), SINK_IDS, TOKENS)
    fail(sink)
    sink.host.give_movers = False
    mover_of(sink).die()
    world.advance(2 * RETRY_WITHIN_S)  # it waits for a mover, for longer than a retry may wait for a grant
    assert sink.ended(ticket) is None


def test_the_second_failure_is_told(world, source, sink):
    mover_of(sink).hold = True
    ticket = sink.pull(source.publish("t1", IDS, TOKENS), SINK_IDS, TOKENS)
    fail(sink)
    assert sink.ended(ticket) is None
    fail(sink)
    failed = sink.ended(ticket)
    assert (failed.code, failed.safe_to_reuse) == (Code.TRANSPORT, True)
    assert not mover_of(sink).started
    assert not any(sink.host.node.grant_client.num_grants().values())


def test_what_may_still_be_written_is_not_read_again(world, source, sink):
    mover_of(sink).hold = True
    ticket = sink.pull(source.publish("t1", IDS, TOKENS), SINK_IDS, TOKENS)
    assert sink.host.node.snapshot().quarantined_bytes == 0
    fail(sink, finished=False)
    assert not sink.ended(ticket).safe_to_reuse
    assert not mover_of(sink).started
    # 3 blocks of 4 tokens, 2 layers, K and V, 2 heads of 2 x 2 bytes
    assert sink.host.node.snapshot().quarantined_bytes == 3 * 4 * 2 * 2 * 2 * 4


def test_it_is_not_read_again_just_before_its_deadline(world, source, sink):
    mover_of(sink).hold = True
    ticket = sink.pull(source.publish("t1", IDS, TOKENS), SINK_IDS, TOKENS, deadline_s=3)
    world.advance(2.9)
    fail(sink)
    assert sink.ended(ticket).safe_to_reuse


def test_a_cancelled_pull_is_not_read_again(world, source, sink):
    mover_of(sink).hold = True
    ticket = sink.pull(source.publish("t1", IDS, TOKENS), SINK_IDS, TOKENS)
    sink.say(wk.Cancel(ticket=ticket))
    fail(sink)
    assert sink.ended(ticket).code is Code.CANCELLED


def test_a_source_that_does_not_answer_any_more_does_not_keep_the_engine_waiting(world, source, sink):
    mover_of(sink).hold = True
    ticket = sink.pull(source.publish("t1", IDS, TOKENS), SINK_IDS, TOKENS, deadline_s=60)
    world.cut.add(("d", "p"))
    fail(sink)
    world.advance(1.9)
    assert sink.ended(ticket) is None
    world.advance(0.2)
    failed = sink.ended(ticket)
    assert (failed.code, failed.safe_to_reuse, failed.message) == (Code.TRANSPORT, True, "lost")


def test_what_was_released_meanwhile_is_said_to_be(world, source, sink):
    mover_of(sink).hold = True
    ref = source.publish("t1", IDS, TOKENS)
    ticket = sink.pull(ref, SINK_IDS, TOKENS)
    source.say(wk.Unpublish(transfer_id="t1"))
    fail(sink)
    assert sink.ended(ticket).code is Code.RELEASED
    assert len([m for m in sink.received(wk.TicketFailed) if m.ticket == ticket]) == 1


def test_the_source_never_sees_the_transfer_without_a_reader_between_the_tries(world, source, sink):
    """The lease has long passed, and only the first try's grant holds it."""
    mover_of(sink).hold = True
    ticket = sink.pull(source.publish("t1", IDS, TOKENS, lease_s=5.0), SINK_IDS, TOKENS, deadline_s=60)
    world.advance(20)
    mover = mover_of(sink)
    fail(sink)
    mover.hold = False
    mover.copy()
    mover.finish()
    assert isinstance(sink.ended(ticket), wk.TicketDelivered)
